"""Export to Hugging Face transformers: the folder, its model card, and the code that it carries."""
