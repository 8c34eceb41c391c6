"""What train.attention_metrics adds to an evaluation in metrics.jsonl: a value for every trial."""

# Each is a mean over layers and heads, null where there is none: a score that is not bilinear has
# no A[n], a value that is not linear no B[n]. Patterns are those of the first validation batch.
ATTENTION = {
    'qk_norm': 'Frobenius norm of A[n], with the scale of the logits',
    'qk_effective_rank': 'effective rank of A[n]',
    'qk_symmetric_share': 'share of the squared norm of A[n] in its symmetric part',
    'qk_factor_norm': 'norm of all parameters of the score of a layer',
    'ov_norm': 'Frobenius norm of B[n]',
    'ov_effective_rank': 'effective rank of B[n]',
    'ov_factor_norm': 'norm of all parameters of the value of a layer',
    'attention_entropy': 'entropy of attention probabilities, nats',
    'attention_logit_deviation': 'standard deviation of the logits of a query, nats',
    'attention_diagonal_mass': 'probability of the token itself',
    'attention_previous_token_mass': 'probability of the token before',
}
