"""Matched models: the same rows, order, seed and schedule; only the attention differs.

texts.py        sources of text -> documents, deduplicated, a held-out part by hash
corpus.py       documents -> tokenizer and rows, generated sequences among them
arms.py         sizes -> one model of each kind, with as many parameters
loop.py         rows -> a trained model; goes on where it was killed
"""
