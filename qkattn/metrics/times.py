"""What differs between two equal runs: the times in each entry of result.json."""

# Each is of the whole run, all its trials together.
TIMES = {
    'train_seconds': 'training steps, over all starts',
    'checkpoint_seconds': 'training waited for checkpoints, over all starts',
    'compile_seconds': 'compilation of the training program, in the last start',
    'tokens_per_second': 'training tokens per second of the last start',
}
