"""Byte-pair encoding (Sennrich et al. 2016) by sentencepiece (Kudo & Richardson 2018), lossless."""

import hashlib
import io
import itertools
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import sentencepiece

from qkattn.data.tokenizers.characters import UNKNOWN, valid_text
from qkattn.errors import ConfigError

# More text than this changes frequent pairs no longer, but costs memory: about 10 bytes per byte.
MAX_TRAINING_BYTES = 50_000_000
# sentencepiece reserves memory for as many pieces as it is asked for.
MAX_SIZE = 2**20

# How sentencepiece writes a space in its pieces, and a character that it trains as unknown.
SPACE, RESERVED = '\u2581', '\u2585'
SEPARATOR_PIECE = '<separator>'
NEWLINE = '\n'

log = logging.getLogger(__name__)


class BPETokenizer:
    """Sub-words, bytes where no sub-word fits: every text comes back byte for byte.

    Ids: 0 is sentencepiece's unknown, which never occurs, because every byte has a piece; then the
    separator, the newline, the 256 bytes, and the sub-words.
    """

    def __init__(self, model: bytes):
        """Args: model: a sentencepiece model that `train` made."""
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.name = f'bpe{self.vocab_size}-{hashlib.sha256(model).hexdigest()[:12]}'
        self.separator = self._processor.piece_to_id(SEPARATOR_PIECE)
        self._text_V = [self._text(i) for i in range(self.vocab_size)]
        self._num_bytes_V = np.array([len(text) for text in self._text_V])
        self._dtype = np.min_scalar_type(self.vocab_size - 1)
        # sentencepiece reads this character as a space; its bytes keep it what it is.
        self._space_ids = [self._processor.piece_to_id(f'<0x{b:02X}>') for b in SPACE.encode()]

    def _text(self, i: int) -> bytes:
        piece = self._processor.id_to_piece(i)
        if self._processor.is_byte(i):
            return bytes([int(piece[1:-1], 16)])
        if i == self.separator:
            return b'\0'
        if self._processor.is_unknown(i):
            return UNKNOWN.encode()
        return piece.replace(SPACE, ' ').encode()

    @classmethod
    def train(cls, texts: Iterable[bytes], size: int) -> Self:
        """Learns `size` pieces from the lines of `texts`; the same text gives the same pieces.

        Of text longer than MAX_TRAINING_BYTES every 2nd, 4th, 8th, ... line is used, whichever is
        the first to bring it below. The rarest characters, 0.05 % of the text together, are left
        to the byte pieces.

        Raises:
          ConfigError: for a size that the text cannot fill or that cannot hold its characters.
          ValueError: if a text is no valid UTF-8.
        """
        if size > MAX_SIZE:
            raise ConfigError(f'data.tokenizer_size={size} must be at most {MAX_SIZE}.')
        lines, model = _training_lines(texts), io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                model_type='bpe',
                # Below 1 it would not say what is large enough.
                vocab_size=max(size, 1),
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                control_symbols=[SEPARATOR_PIECE],
                # What makes it lossless; spaces at the end of a line and newlines included.
                normalization_rule_name='identity',
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                byte_fallback=True,
                allow_whitespace_only_pieces=True,
                user_defined_symbols=[NEWLINE],
                # No line is too long to be read, and threads would not add up in the same order.
                max_sentence_length=2**30,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise _explained(error, size) from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, model: bytes) -> Self:
        """From what `model` returned."""
        return cls(model)

    def model(self) -> bytes:
        """Everything that the tokenizer is: a sentencepiece model."""
        return self._model

    def encode(self, text: str | bytes) -> np.ndarray:
        """Ids of the pieces.

        Raises:
          ValueError: if the text is no valid UTF-8; names the byte offset.
        """
        lines, *others = (self._encode_lines(part) for part in valid_text(text).split(SPACE))
        for other in others:
            lines += [self._space_ids, *other]
        return np.fromiter(itertools.chain.from_iterable(lines), self._dtype)

    def _encode_lines(self, text: str) -> list[list[int]]:
        # Line by line is several times faster, and no piece spans two lines.
        lines = [line + NEWLINE for line in text.split(NEWLINE)]
        # A list costs a thread, too much for the single lines of parallel text.
        encode = self._processor.encode
        lines_ids = encode(lines, num_threads=1) if len(lines) > 8 else list(map(encode, lines))
        lines_ids[-1].pop()  # The newline that ends no line.
        return lines_ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text; a separator reads as U+0000, bytes that are no valid UTF-8 as U+FFFD."""
        return b''.join(self._text_V[i] for i in ids).decode(errors='replace')

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """Bytes of the pieces; a separator counts as one."""
        return int(self._num_bytes_V[np.asarray(ids, np.int64)].sum())


def _training_lines(texts: Iterable[bytes]) -> list[str]:
    """The lines of the texts; every other one, every fourth, ... where that is too much text."""
    lines, num_bytes, stride, number = [], 0, 1, 0
    for text in texts:
        # sentencepiece would read the one as a space and leave out lines that hold the other.
        whole = valid_text(text).replace(SPACE, NEWLINE).replace(RESERVED, NEWLINE)
        for line in whole.split(NEWLINE):
            if number % stride == 0:
                lines.append(line)
                num_bytes += len(line.encode())
            number += 1
            if num_bytes > MAX_TRAINING_BYTES:
                lines, stride = lines[::2], 2 * stride
                num_bytes = sum(len(line.encode()) for line in lines)
    if stride > 1:
        log.info('Pieces are learned from one in %d of %d lines of text', stride, number)
    return lines


def _explained(error: RuntimeError, size: int) -> ConfigError | RuntimeError:
    said = str(error)
    if match := re.search(r'too high .* value <= (\d+)', said):
        valid = f'is more than the training text supports; it must be at most {match[1]}'
    elif match := re.search(r'smaller than required_chars. \S+ vs (\d+)', said):
        valid = f'cannot hold the bytes and characters; it must be at least {match[1]}'
    elif 'sentences_.empty()' in said:
        return ConfigError("data.tokenizer='bpe' cannot be trained: the training text is empty.")
    else:
        return error
    return ConfigError(f'data.tokenizer_size={size} {valid}.')
