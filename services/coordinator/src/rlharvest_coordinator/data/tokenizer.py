"""The tokenizer of a job: text to ids once, at validation, and finished ids to text.

Invariants: ids are never made from decoded text; decoding never fails, ids that the vocabulary lacks are left out;
after a chat template no special token is added (the template writes them, so there is no second BOS), before a plain
string those that the tokenizer puts first are, and never an EOS at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import blake3
from rlharvest.errors import InvalidField
from tokenizers import Tokenizer as Backend

from rlharvest_coordinator.data.templates import ChatTemplate, TemplateFailed, find

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_PROBE = "a"


class Tokenizer:
    """A tokenizer with its chat template.

    Attributes:
        vocab: number of ids; a model with more has a padded head, whose ids are never to be sampled.
        bos_id: None if there is none.
        eos_ids: all ids that end a response.
        digest: blake3 of tokenizer.json and the chat template.
        template: None for a base model.
        special: texts of the special tokens.
    """

    def __init__(self, file: bytes, config: dict[str, Any], template: str | None, eos_ids: Iterable[int]) -> None:
        """Read the content of a tokenizer.json; `config` is that of tokenizer_config.json.

        Raises:
            TemplateFailed: the chat template is no Jinja template.
            Exception: the tokenizers library cannot read `file`.
        """
        backend = Backend.from_buffer(file)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        names = {name: text for name in _SPECIAL if (text := _text(config.get(name))) is not None}
        self.vocab = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
        eos = backend.token_to_id(names["eos_token"]) if "eos_token" in names else None
        self.eos_ids = frozenset(eos_ids) | (frozenset() if eos is None else {eos})
        self.special = tuple(
            token.content for token in backend.get_added_tokens_decoder().values() if token.special and token.content
        )
        self.template = None if template is None else ChatTemplate(template, names)
        self._prefix = self._leading_ids(config)
        self.digest = blake3.blake3(file + b"\0" + (template or "").encode()).hexdigest()

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of plain strings, with the special tokens that this tokenizer puts first."""
        return [self._prefix + ids for ids in self.encode_rendered(texts)]

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts that a chat template wrote.

        Raises:
            InvalidField: the tokenizer cannot encode one of them.
        """
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception, e.g. for a vocabulary without an unknown token
            raise InvalidField(
                "tokenizer",
                None,
                f"cannot encode a prompt ({error})",
                "Use the tokenizer that the model was trained with.",
            ) from error
        return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a finished response, special tokens left out; never fails."""
        return self._backend.decode([int(id) for id in ids if 0 <= id < self.vocab], skip_special_tokens=True)

    def piece(self, id: int) -> str:
        """Return the text of one token, of special ones too; bytes that are no character come out as U+FFFD."""
        return self._backend.decode([id], skip_special_tokens=False) if 0 <= id < self.vocab else ""

    def _leading_ids(self, config: dict[str, Any]) -> list[int]:
        """Ids put before a plain string; `add_bos_token` of the configuration wins over the file's own rule."""
        bare = self._backend.encode(_PROBE, add_special_tokens=False).ids
        full = self._backend.encode(_PROBE, add_special_tokens=True).ids
        starts = (place for place in range(len(full) - len(bare) + 1) if full[place : place + len(bare)] == bare)
        prefix = list(full[: next(starts, 0)])
        wanted = config.get("add_bos_token")
        if wanted is True and self.bos_id is not None and self.bos_id not in prefix:
            return [self.bos_id, *prefix]
        return [id for id in prefix if id != self.bos_id] if wanted is False else prefix


def load(directory: Path, *, eos_ids: Iterable[int], field: str) -> Tokenizer:
    """Return the tokenizer of a directory; `eos_ids` are those that the model names besides.

    Raises:
        InvalidField: for `field`; the directory has no tokenizer that can be used; says what to do.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        slow = next(
            (name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (directory / name).is_file()), None
        )
        raise InvalidField(
            field,
            str(directory),
            "there is no tokenizer.json" + (f", only {slow}" if slow else ""),
            "Write one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
            if slow
            else "Copy it from the model, or set `tokenizer` to a directory that has it.",
        )
    config = {
        **read_json(directory / "special_tokens_map.json", field),
        **read_json(directory / "tokenizer_config.json", field),
    }
    try:
        return Tokenizer(file.read_bytes(), config, find(directory, config), eos_ids)
    except TemplateFailed as error:
        raise InvalidField(field, str(directory), str(error), "Correct its chat_template.") from error
    except Exception as error:
        raise InvalidField(
            field, str(file), f"is no tokenizer ({str(error)[:200]})", "Copy the file again from the model."
        ) from error


def read_json(path: Path, field: str) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no such file.

    Raises:
        InvalidField: for `field`; the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidField(field, str(path), f"is not JSON ({error})", "Copy the file again.") from error
    if not isinstance(value, dict):
        raise InvalidField(field, str(path), f"is a {type(value).__name__}, not an object", "Copy the file again.")
    return value


def _text(token: Any) -> str | None:
    """Return the text of a token that is written as a string, or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None
