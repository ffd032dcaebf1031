"""Models of the Hugging Face Hub by name: download and convert in one pass; list, remove."""
