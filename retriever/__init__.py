"""The retrieval service. Its packages from the ground up; each imports only those above it here:

corpus      rows of a JSONL file, their offsets, other layouts, and pages by URL
encoders    texts to words and to vectors, hashed or by a model; rerankers
indexes     building, opening and searching: FAISS, JAX, BM25
service     HTTP: batching, result store, limits, loading
contrib     Qdrant and web search, loaded by name through `backends.KINDS`

Users subclass `indexes.backend.Backend` for another kind of index; `interfaces` has the types of what they
return.
"""
