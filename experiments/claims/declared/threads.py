"""The public discussions whose statements the claims test, as Markdown links."""

TWO_MATRICES = (
    '[Why do we need both a key and a query weight matrix?]'
    '(https://stats.stackexchange.com/questions/515477), Cross Validated'
)
EVERY_HEAD = (
    '[Why do we need both W_i^Q and W_i^K?]'
    '(https://ai.stackexchange.com/questions/25217), Artificial Intelligence Stack Exchange'
)
NO_QUERY_MATRIX = (
    '[W_Q can be omitted in single-head attention]'
    '(https://www.reddit.com/r/MachineLearning/comments/y2w87i/), r/MachineLearning'
)
SYMMETRIC = (
    '[Practical experiments on self-attention: QQ^T vs. QK^T]'
    '(https://datascience.stackexchange.com/questions/128895), Data Science Stack Exchange'
)
TWO_IN_A_ROW = (
    '[Query computation in self-attention: multiple linear transformations]'
    '(https://community.deeplearning.ai/t/357334), DeepLearning.AI'
)
