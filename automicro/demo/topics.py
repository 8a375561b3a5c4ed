"""Python's own documentation as text: rows of bytes or word numbers of natural length.

The text is `pydoc_data.topics`, which ``help("for")`` shows. It comes with Python, so nothing is
downloaded, and it differs between Python versions.
"""

import functools
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pydoc_data.topics import topics as TOPICS
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchmetrics import Metric

VOCABULARY = 257
BOUNDARY = 256  # the only token that is not a byte: it starts each row, and pads it
IGNORED = -100

# Indices into families of topics, largest first: a sample of large and small ones, without the very
# largest, which holds two fifths of the text.
FIRST_HELD_OUT, HELD_OUT_EVERY = 4, 8
QUOTED_CHARACTERS = 40

LARGE_VOCABULARY = 131_072  # words, as in current language models
_BEFORE_WORDS = 0  # the only number that is not a word: it starts each row, and pads it

_WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+")
_PARAGRAPH = re.compile(rb".+?(?:\n\s*\n|\Z)", re.DOTALL)
# MPS has no float64.
_SUM_DTYPE = torch.float32 if torch.backends.mps.is_available() else torch.float64


def loader(
    split: str,
    *,
    batch_size: int,
    max_length: int = 128,
    seed: int | None = 0,
    shuffle: bool | None = None,
) -> "DataLoader[dict[str, Tensor]]":
    """Return batches for a causal language model in the format of transformers.

    A batch maps ``input_ids``, ``attention_mask`` and ``labels`` to int64 tensors of shape ``(rows,
    longest row)``. A row is a boundary token and the bytes of one piece of text (see `pieces`),
    padded to the longest row. Labels are -100 at padding and at the first token. The last batch of
    an epoch can be smaller; no row is dropped.

    Args:
        split: ``"train"`` or ``"eval"``.
        batch_size: rows of an optimization batch.
        max_length: maximum number of tokens per row, including the boundary token.
        seed: seed of the loader's own generator, which decides the order; None for torch's global
            one.
        shuffle: whether to shuffle each epoch; by default True for ``"train"`` only.

    Raises:
        ValueError: an unknown split, or a length without room for a byte.

    >>> batch = next(iter(loader("eval", batch_size=8, max_length=64)))
    >>> batch["input_ids"].shape, batch["input_ids"][0, 0].item()
    (torch.Size([8, 62]), 256)
    """
    if max_length < 2:
        raise ValueError(
            f"max_length={max_length} leaves no room for a byte after the boundary token: give at "
            "least 2"
        )
    data: Any = pieces(split, max_bytes=max_length - 1)
    return DataLoader(
        data,
        batch_size=batch_size,
        shuffle=split == "train" if shuffle is None else shuffle,
        collate_fn=_collate,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )


def word_loader(
    split: str,
    *,
    batch_size: int,
    max_length: int = 64,
    vocabulary: int = LARGE_VOCABULARY,
    seed: int | None = 0,
    shuffle: bool | None = None,
) -> "DataLoader[dict[str, Tensor]]":
    """Return batches as `loader` does, but of whole words, with a vocabulary of any size.

    Words, punctuation and whitespace are tokens. A checksum spreads their numbers over the
    vocabulary, so no table must be learned, and very few words collide.

    Args:
        split: ``"train"`` or ``"eval"``.
        batch_size: rows of an optimization batch.
        max_length: maximum number of tokens per row, including the one before its words.
        vocabulary: number of tokens, including 0, which starts and pads rows.
        seed: seed of the order, as in `loader`.
        shuffle: whether to shuffle each epoch; by default True for ``"train"`` only.

    Raises:
        ValueError: an unknown split, or a length or vocabulary without room for a word.

    >>> batch = next(iter(word_loader("eval", batch_size=8, max_length=16)))
    >>> batch["input_ids"].shape, int(batch["input_ids"].max()) > 65_536
    (torch.Size([8, 16]), True)
    """
    if max_length < 2 or vocabulary < 2:
        raise ValueError(
            f"max_length={max_length} and vocabulary={vocabulary} leave no room for a word after "
            "the first token: give at least 2 for both"
        )
    rows: Any = [
        words[start : start + max_length - 1]
        for paragraph in pieces(split, max_bytes=1 << 20)
        for words in [numbers_of_words(paragraph.decode(), vocabulary)]
        for start in range(0, len(words), max_length - 1)
    ]
    return DataLoader(
        rows,
        batch_size=batch_size,
        shuffle=split == "train" if shuffle is None else shuffle,
        collate_fn=functools.partial(_collate, boundary=_BEFORE_WORDS),
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )


def numbers_of_words(text: str, vocabulary: int) -> list[int]:
    """Return the numbers of a text's words, from 1 to one less than the vocabulary.

    >>> numbers_of_words("for x in x", 131_072)
    [98739, 5270, 94176, 5270]
    """
    # Python's own hash of a string differs between processes.
    return [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in _WORD.findall(text)]


def pieces(split: str, *, max_bytes: int) -> list[bytes]:
    """Return one part of the documentation, paragraph by paragraph.

    >>> text = b"".join(pieces("eval", max_bytes=100))
    >>> text == b"".join(pieces("eval", max_bytes=50))
    True
    """
    # A paragraph keeps the empty lines after it. Long paragraphs are cut after a line, else after a
    # word, else anywhere. Whole topics are held out, with all topics that quote them, so that no
    # long paragraph is in both parts.
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r} is not a part of the topics: use 'train' or 'eval'")
    if max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} leaves no room for a byte: give at least 1")
    return [
        piece
        for topic in topics_of(split)
        for paragraph in _PARAGRAPH.findall(TOPICS[topic].encode())
        for piece in _cut(paragraph, max_bytes)
    ]


@functools.cache
def topics_of(split: str) -> tuple[str, ...]:
    """Return the sorted topic names of a part.

    >>> set(topics_of("train")) & set(topics_of("eval"))
    set()
    """
    families = sorted(_families(), key=lambda names: (-sum(len(TOPICS[n]) for n in names), names))
    held_out = {name for names in families[FIRST_HELD_OUT::HELD_OUT_EVERY] for name in names}
    return tuple(sorted(held_out if split == "eval" else TOPICS.keys() - held_out))


def _families() -> list[list[str]]:
    """Group topics that share a long paragraph."""
    # Names of a family share one list, so that it grows for all of them. Some topics are chapters
    # that contain others verbatim.
    home = {name: [name] for name in TOPICS}
    quoting: dict[str, list[str]] = defaultdict(list)
    for name, text in TOPICS.items():
        for paragraph in _PARAGRAPH.findall(text.encode()):
            words = " ".join(paragraph.decode().split())
            if len(words) >= QUOTED_CHARACTERS:
                quoting[words].append(name)
    for first, *others in quoting.values():
        for other in others:
            if home[first] is not home[other]:
                home[first].extend(home[other])
                for name in home[other]:
                    home[name] = home[first]
    # Each family once, at the name that started it.
    return [sorted(family) for name, family in home.items() if family[0] == name]


def _cut(paragraph: bytes, max_bytes: int) -> list[bytes]:
    cut = []
    while len(paragraph) > max_bytes:
        head = paragraph[:max_bytes]
        end = head.rfind(b"\n") + 1 or head.rfind(b" ") + 1 or max_bytes
        cut.append(paragraph[:end])
        paragraph = paragraph[end:]
    return [*cut, paragraph]


def _collate(rows: Sequence[Sequence[int]], boundary: int = BOUNDARY) -> dict[str, Tensor]:
    tokens = [torch.tensor([boundary, *row]) for row in rows]
    lengths = torch.tensor([len(row) for row in tokens])
    input_ids = pad_sequence(tokens, batch_first=True, padding_value=boundary)
    # By lengths, because the boundary token both starts a row and pads it.
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    labels = input_ids.masked_fill(input_ids == boundary, IGNORED)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


class BitsPerByte(Metric):
    """Cross entropy per byte in bits: the number of bits a model needs to encode the text.

    Each byte counts the same, regardless of batches and row lengths.

    >>> metric = BitsPerByte()
    >>> metric.update(torch.zeros(2, 9, 257), torch.zeros(2, 9, dtype=torch.int64))
    >>> metric.compute()
    tensor(8.0056, dtype=torch.float64)
    """

    higher_is_better = False
    is_differentiable = False
    full_state_update = False

    nats: Tensor
    num_bytes: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("nats", torch.zeros((), dtype=_SUM_DTYPE), dist_reduce_fx="sum")
        self.add_state("num_bytes", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add rows.

        Args:
            logits: shape (rows, length, vocabulary); logits at a position predict the next token.
            labels: shape (rows, length), not shifted; -100 where nothing is predicted.
        """
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()  # too coarse for a logarithm
        losses = F.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            ignore_index=IGNORED,
            reduction="none",
        )
        self.nats += losses.to(self.nats.dtype).sum()
        self.num_bytes += (labels[:, 1:] != IGNORED).sum()

    def compute(self) -> Tensor:
        """Return the bits per byte of all rows so far."""
        return self.nats / self.num_bytes / math.log(2)
