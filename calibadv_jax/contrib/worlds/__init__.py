"""A generated encyclopedia with questions, its tokenizer, and demonstrations for the cold start."""
