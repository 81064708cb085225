"""Loading a model: hub, architecture, tokenizer, chat template, LoRA, device, memory plan."""
