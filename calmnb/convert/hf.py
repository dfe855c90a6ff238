"""Hugging Face folders: configuration, weights, tokenizer and chat templates of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calmnb.convert.hf_config import architecture_of, read_config
from calmnb.convert.safetensors_files import SafetensorsFiles, load_json
from calmnb.convert.source import Source, plan_llama
from calmnb.convert.vocabulary import Vocabulary, from_sentencepiece, from_tokenizer_json
from calmnb.errors import CalmnbError, FormatError, UnsupportedError

__all__ = ["read_folder"]

_TOP = {
    "model.embed.weight": "model.embed_tokens.weight",
    "model.norm.weight": "model.norm.weight",
    "model.output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn.norm": "input_layernorm",
    "attn.wq": "self_attn.q_proj",
    "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj",
    "attn.wo": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
}
_SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_folder(folder: Path) -> Source:
    """Open a Hugging Face checkpoint of the Llama, Mistral or Qwen2 family.

    Raises
    ------
    FormatError, TensorError
        If a file is missing or damaged.
    UnsupportedError
        If the configuration asks for what this version cannot run.
    """
    path = folder / "config.json"
    if not path.exists():
        raise FormatError(f"{folder} holds no config.json, so it is not a Hugging Face checkpoint; is it the right folder?")
    raw = load_json(path)
    architecture_of(raw, path)  # before the tensors: "unknown architecture" says more than "unused tensor"
    reader = SafetensorsFiles(folder)
    try:
        return _read(folder, raw, reader)
    except BaseException as error:
        reader.close()
        if isinstance(error, TypeError | ValueError | AttributeError | ArithmeticError) and not isinstance(error, CalmnbError):
            # A value of a kind that no check foresaw, such as a list where every checkpoint has a number.
            raise FormatError(
                f"{folder}: a value in its JSON files is of the wrong kind ({error}); download it again"
            ) from error
        raise


def _read(folder: Path, raw: Mapping[str, Any], reader: SafetensorsFiles) -> Source:
    path = folder / "config.json"
    generation, about = (_optional_json(folder / name) for name in ("generation_config.json", "tokenizer_config.json"))
    rows = raw.get("vocab_size")
    vocabulary = _read_vocabulary(folder, rows, about) if type(rows) is int else Vocabulary()
    special = {role: text for role in _SPECIAL_ROLES if (text := _content(about.get(role))) is not None}
    ending = vocabulary.ids.get(special.get("eos_token", ""))
    config = read_config(raw, generation, reader.shapes, path, more_stop_ids=() if ending is None else (ending,))
    recipes = plan_llama(
        config,
        reader,
        _source_name,
        path=folder,
        tied=raw.get("tie_word_embeddings") is True,
        half_split=True,
        needs_bias=config.arch == "qwen2" or raw.get("attention_bias") is True,
        is_ignored=lambda name: name.endswith("rotary_emb.inv_freq"),
    )
    for recipe in recipes:
        for name, _, _ in recipe.parts:
            if name is not None and reader.dtype_of(name) not in ("F32", "F16", "BF16", "F64"):
                raise UnsupportedError(
                    f"{folder}: tensor {name} is stored as {reader.dtype_of(name)}; F32, F16 and BF16 weights are converted. "
                    "Is this checkpoint quantised already?"
                )
    templates = _read_templates(folder, about)
    if "default" in templates:
        vocabulary.extras["chat_template"] = templates.pop("default").encode("utf-8")
    settings: dict[str, Any] = {"special_tokens": special, "chat_templates": templates}
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(about.get(key), bool):
            settings[key] = about[key]
    name = raw.get("_name_or_path")
    if not isinstance(name, str) or not name or Path(name).is_absolute():
        name = folder.resolve().name  # another machine's path says nothing here
    settings["source"] = {"format": "huggingface", "name": name}
    return Source(folder, config, reader, recipes, vocabulary, settings)


def _source_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"


def _optional_json(path: Path) -> dict[str, Any]:
    return load_json(path) if path.exists() else {}


def _content(token: Any) -> str | None:
    """Text of a special token, given as such or as an object with flags."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_vocabulary(folder: Path, rows: int, about: Mapping[str, Any]) -> Vocabulary:
    decoder = about.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(key.isdecimal() and isinstance(flags, dict) for key, flags in decoder.items()):
        raise FormatError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must map ids to objects")
    flags = {int(key): value for key, value in decoder.items()}
    path = folder / "tokenizer.json"
    if path.exists():
        return from_tokenizer_json(_read_bytes(path), rows, path, flags)
    path = folder / "tokenizer.model"
    if path.exists():
        added = {str(value["content"]): index for index, value in flags.items() if isinstance(value.get("content"), str)}
        added |= {text: index for text, index in _optional_json(folder / "added_tokens.json").items() if type(index) is int}
        return from_sentencepiece(_read_bytes(path), rows, path, added)
    for other in ("vocab.json", "tekken.json"):
        if (folder / other).exists():
            raise UnsupportedError(
                f"{folder} has a tokenizer in {other} only; tokenizer.json and tokenizer.model are read. Saving the tokenizer "
                "with transformers (AutoTokenizer ... save_pretrained) makes a tokenizer.json"
            )
    return Vocabulary()


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error
    if data.startswith(b"version https://git-lfs"):
        raise FormatError(f"{path} is a Git LFS pointer; fetch the file with `git lfs pull` or download it again")
    return data


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8 text ({error}); download it again") from error


def _read_templates(folder: Path, about: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file overrides the key of tokenizer_config.json."""
    found: dict[str, str] = {}
    listed = about.get("chat_template")
    if isinstance(listed, str):
        found["default"] = listed
    elif isinstance(listed, list):
        found |= {
            item["name"]: item["template"]
            for item in listed
            if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        }
    if (folder / "chat_template.jinja").exists():
        found["default"] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    return found
