"""The retrieval service, a package of its own. From the ground up; a room imports only those above it here:

corpus      rows of a JSONL file, where each begins, and pages by URL
encoders    texts to vectors: hashed, or with weights
search      what finds: FAISS, JAX, BM25, Qdrant, the web; opening an index; reranking
indexing    what builds an index
service     what serves it over HTTP: batching, result store, limits, loading
"""
