"""Models of the Hugging Face Hub by name: download, convert and quantize in one pass; list, remove."""
