"""What differs between two equal runs: the times in each entry of result.json."""

# Each is of the whole run, all its trials together.
TIMES = {
    'train_seconds': 'training steps, over all starts',
    'input_seconds': 'of these, waiting for the next batch on the devices',
    'gap_seconds': 'of these, devices without work between two dispatches',
    'logging_seconds': 'of these, writing metrics, mostly beside a step',
    'checkpoint_seconds': 'training waited for checkpoints, over all starts',
    'compile_seconds': 'compilation of the training program, in the last start',
    'tokens_per_second': 'training tokens per second of the last start',
}
