"""A variant as text and as LaTeX."""

import pytest

from qkattn.explore.bench import Bench
from qkattn.explore.worked import equation_latex, symbol_latex, worked

pytest.importorskip('sympy', reason="pip install -e '.[explore]'")

TEXT = """\
shared_qk/no_vo: 2 tokens, d_model 2, 1 head

A[n] = W_Q[n] W_Q[n]^T
  W_Q: 2 x 2
  a11 = q11^2 + q12^2
  a12 = q11 q21 + q12 q22
  a22 = q21^2 + q22^2
  A = [ a11  a12 ]
      [ a12  a22 ]
  symmetric, rank 2

scores, s = x A x^T
  s11 = a11 x11^2 + 2 a12 x11 x12 + a22 x12^2
  s12 = a11 x11 x21 + a12 x11 x22 + a12 x12 x21 + a22 x12 x22
  s21 = a11 x11 x21 + a12 x11 x22 + a12 x12 x21 + a22 x12 x22
  s22 = a11 x21^2 + 2 a12 x21 x22 + a22 x22^2
  equal: s12 = s21

input of the softmax: sqrt(2)/2 s, so p_ts = exp(sqrt(2)/2 s_ts) / sum_u exp(sqrt(2)/2 s_tu)

B[n] = P[n] P[n]^T
  B = [ 1  0 ]
      [ 0  1 ]
  identity, rank 2

output, out = p x B
  out11 = p11 x11 + p12 x21
  out12 = p11 x12 + p12 x22
  out21 = p21 x11 + p22 x21
  out22 = p21 x12 + p22 x22

4 parameters, 4 in A and 0 in B; A and B move in 3 directions, 1 changes nothing
"""


def test_text():
    assert worked(Bench('shared_qk/no_vo')) == TEXT


def test_latex_has_the_same_equations():
    text = worked(Bench('qk/vo', heads=2), latex=True)
    assert text.count(r'\begin{align*}') == text.count(r'\end{align*}') == 4
    assert r'a^{(2)}_{21} &= q^{(2)}_{21} k^{(2)}_{11} \\' in text
    assert r'\frac{\exp(s^{(n)}_{ts})}{\sum_u \exp(s^{(n)}_{tu})}' in text
    assert r'\frac{\sqrt{2}}{2}' in worked(Bench('qk/vo'), latex=True)


def test_symbols_and_equations_in_latex():
    symbols = {'q12': 'q_{12}', '-a12': '-a_{12}', 'sign[2]1': r'\mathrm{sign}^{(2)}_{1}'}
    assert {name: symbol_latex(name) for name in symbols} == symbols
    assert equation_latex('W_Q[n] W_K[n]^T, rank R') == (
        r'{W_{\mathrm{Q}}^{(n)}} {W_{\mathrm{K}}^{(n)}}^{\top},\ \text{rank R}'
    )
