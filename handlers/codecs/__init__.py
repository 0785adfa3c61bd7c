"""The shapes that clients speak, one module each: a body → a Draft; results and errors → a body in the same shape.

    codec          what every codec can do, and what most of them share
    plain          this project's own: text, texts, or the fields of one instance
    huggingface    `inputs` and `parameters`
    tei            text-embeddings-inference's routes: embed, embed_sparse, rerank, predict
    openai         `v1/embeddings`
    cohere         `v1/rerank`, as Cohere and Jina answer it
    kserve         `instances` → `predictions` (KServe v1, Vertex AI); the Open Inference Protocol (KServe v2)
    sagemaker      JSON Lines and CSV, as on SageMaker's /invocations

A handler doesn't know which of them a client spoke, and a codec doesn't know the task but by its `Task`.
"""
