"""Choosing the next token from logits. (Parameters here; the sampler itself follows.)"""
