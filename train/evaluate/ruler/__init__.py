"""RULER's thirteen tasks (Hsieh et al., arXiv 2404.06654) with the words, needles, templates and scores of its code.

The wording is that of github.com/NVIDIA/RULER (Apache License 2.0).
"""
