"""The decode loop: session, sampling, CUDA graphs, runners, speculative decoding, text."""
