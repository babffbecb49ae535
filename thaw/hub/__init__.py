"""Models on a hub that speaks Hugging Face's API: names, answers and links."""
