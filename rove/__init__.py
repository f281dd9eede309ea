"""What the scripts share: settings, shards, tokenizers, checkpoints, metrics, evaluations."""
