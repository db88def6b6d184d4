"""Drafts from history: what earlier responses to a prompt, and siblings of the same group, say about the next tokens.

The method is HistoSpec of RhymeRL (arXiv 2508.18588, section 4.2). All of it is pure: no I/O, no clock, no torch. A draft
never changes what is sampled; it only lets an engine compute several positions at once.
"""
