"""Batched transformer inference inside a TorchServe worker. This package is vendored whole into every archive.

Where to look:

    embedding            the entry module: parse, forward, render of one task
    base                 TorchServe's life cycle (initialize, preprocess, inference, postprocess) ↔ the pipeline
    decoding             a row as TorchServe hands it over → the body and route that the client meant
    protocol             body → Request; values → bytes in the shape that the client spoke
    tokens               texts → encodings; encodings → packed or padded tensors
    batching             lengths → micro-batches; pure integers
    runner               runs micro-batches: halves on failure, repairs non-finite rows, restores the order
    model, attention     load, place, check and time the network; attention without padding
    pooling              token states → one vector per text
    options, parking     checks of request options; stepping aside before a worker is scaled away
    config, errors       the `handler:` section; what can be wrong with a request
    metrics, threads     the one list of metric names; the worker's share of the machine's cores

Importing this package imports nothing else.
"""
