"""Batched transformer inference inside a TorchServe worker. This package is vendored whole into every archive.

Where to look:

    embedding, reranking, classification, zero_shot, token_classification, question_answering, fill_mask,
    sparse_embedding, seq2seq
                         the entry modules, one class each: a task's item, texts, forward and render
    base                 TorchServe's life cycle (initialize, preprocess, inference, postprocess) ↔ the pipeline
    decoding             a row as TorchServe hands it over → the body and route that the client meant
    protocol, codecs     body → Request; values → bytes in the shape that the client spoke, one codec a shape
    request, options     what one client asks; checks of what it sent
    intake, work         what a batch takes on; its way through the pipeline, one slot a row
    tokens, truncation   texts, pairs and windows → encodings; encodings → packed or padded tensors; what is cut off
    batching             lengths → micro-batches; pure integers
    runner               runs micro-batches: halves on failure, repairs non-finite rows, restores the order
    model, packing       load, place, check and run the network; whether layouts agree, heads over packed texts
    costs, attention     what forward passes cost; attention without padding
    generator            an encoder-decoder writes, under a deadline; decoding_options are what a request may set
    pooling, quantization, prompts
                         token states → one vector per text; vectors in one byte or bit; what goes before a text
    scores, hypotheses, entities, spans, windows, masks
                         logits → labels, ranked labels, entities, answers; long texts in windows; where masks are
    card, serialise      what is served; values → JSON
    parking              stepping aside before a worker is scaled away
    config, errors       the `handler:` section; what can be wrong with a request
    metrics, threads, cores, memory
                         the one list of metric names; the worker's share of the machine
    wire                 TorchServe's socket, read in large pieces

Importing this package imports nothing else.
"""
