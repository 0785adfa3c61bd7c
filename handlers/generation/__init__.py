"""Text generation with continuous batching: requests join and leave the running batch at every token.

Where to look:

    handler              the entry module: requests, engine and answers put together
    mailbox              TorchServe's `continuousBatching` mode: `handle` collects what is new for every open request
    requests             a body in OpenAI's, Hugging Face's or our plain shape → what is asked, checked
    parameters           the checks of single parameters
    messages, tools      a chat's messages; the functions that may be called
    prompts              messages and texts → token ids
    calls, call_reader   how a model writes calls, as its template shows; calls in a growing text
    rules, grammar       what an answer must follow → which tokens may come next, by llguidance where that is installed
    trial                a process of its own that tries a grammar first
    exchange             one request's way: its sequences' texts and its answer, whole or as a stream
    detokenizer          token ids → text as it grows; stop strings
    responses            values → the bytes of OpenAI's and of our plain shape
    engine               the interface: submit, collect, cancel, stats
    continuous           the engine on transformers' continuous batching
    scheduler, sampler   what runs next; logits → the next token, each sequence by its own settings
    layout, cache_reader which keys a step reads together; how layers read the paged cache
    attention            attention over them, sequence by sequence
    vllm_engine          the engine on vLLM, where that is installed
    sizing               memory → cache blocks; pure integers
    settings, metrics    the `handler:` section; what is counted

Importing this package imports nothing else.
"""
