"""CORE: 22 few-shot tasks, centred on chance (DCLM, arXiv 2406.11794), prompted as nanochat does.

`bundle` finds and reads the data, `prompts` makes token rows of it, `scoring` takes accuracies.
"""
