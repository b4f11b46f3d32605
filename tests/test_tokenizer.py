"""Tokenizers from both kinds of file, chat templates, text that grows without breaking (F32)."""

import itertools
import json
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jaxspec.chat_template import ChatTemplate
from jaxspec.tokenizer import Tokenizer, load_tokenizer
from jaxspec.weights.files import ModelFileError
from tests.smollm2 import REFERENCE, smollm2_checkpoint

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def gguf_metadata(words: str = "smollm", **changes) -> dict:
    """A byte vocabulary after three control tokens, with a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "a b"]
    tokens = ["<|end|>", "<|im_start|>", "<|im_end|>", *alphabet]
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += ["<think>", "[PAD300]"]
    types = [3, 3, 3, *[1] * (len(tokens) - 5), 4, 5]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": words,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    } | changes


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(token) for token in tokenizer.encode(text, add_special_tokens=False)]


# SmolLM2 itself: everything below was computed by transformers.


@pytest.fixture(scope="module")
def smollm2():
    checkpoint = smollm2_checkpoint()
    return load_tokenizer(checkpoint.tokenizer_source, name=checkpoint.name)


@pytest.mark.network
@pytest.mark.parametrize("index", range(len(REFERENCE["nll"])))
def test_smollm2_texts_have_the_reference_ids(smollm2, index):
    entry = REFERENCE["nll"][index]
    assert smollm2.encode(entry["text"]) == entry["ids"]
    assert entry["decoded_equals_text"]
    assert smollm2.decode(entry["ids"]) == entry["text"]


@pytest.mark.network
@pytest.mark.parametrize("index", range(len(REFERENCE["chat_greedy"])))
def test_smollm2_chats_have_the_reference_ids(smollm2, index):
    entry = REFERENCE["chat_greedy"][index]
    assert smollm2.encode_chat([{"role": "user", "content": entry["user"]}]) == entry["prompt_ids"]
    assert smollm2.decode(entry["greedy_ids"], skip_special_tokens=False) == entry["text"]


@pytest.mark.network
def test_smollm2_writes_its_default_system_turn_unless_given_one(smollm2):
    user = {"role": "user", "content": "Hi"}
    assert smollm2.apply_chat_template([user]) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    system = {"role": "system", "content": "Rhyme."}
    assert smollm2.apply_chat_template([system, user], add_generation_prompt=False) == (
        "<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


@pytest.mark.network
def test_smollm2_special_tokens(smollm2):
    assert smollm2.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }
    assert [smollm2.is_special(token) for token in (0, 16, 17)] == [True, True, False]
    assert (smollm2.vocab_size, smollm2.token_id("<empty_output>")) == (49152, 16)
    assert smollm2.encode("<|im_end|>x") == [2, smollm2.token_id("x")]


# Tokenizers from GGUF metadata.


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        ("smollm", " the 123", ["Ġthe", "Ġ", "1", "2", "3"]),
        ("qwen2", " the 123", ["Ġthe", "Ġ", "1", "2", "3"]),
        ("llama-bpe", " the 123", ["Ġthe", "Ġ", "123"]),
        ("llama-bpe", "1231", ["123", "1"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("smollm", "e\u0301", ["e", "Ì", "ģ"]),
    ],
)
def test_each_family_cuts_words_its_own_way(words, text, expected):
    tokenizer = load_tokenizer(gguf_metadata(words), name="m")
    assert pieces(tokenizer, text) == expected


@pytest.mark.parametrize(
    ("words", "flag", "adds"),
    [("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_a_bos_token_is_added_where_the_model_expects_it(words, flag, adds):
    changes = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = load_tokenizer(gguf_metadata(words, **changes), name="m")
    assert (tokenizer.encode("ab")[0] == 1) == adds
    assert tokenizer.encode("ab", add_special_tokens=False)[0] != 1
    assert tokenizer.encode("<|im_start|>ab").count(1) == 1


def test_a_bos_token_that_is_asked_for_must_exist():
    metadata = gguf_metadata(**{"tokenizer.ggml.add_bos_token": True})
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(
        ModelFileError, match=r"is corrupt \(KeyError\('tokenizer.ggml.bos_token_id"
    ):
        load_tokenizer(metadata, name="m")


def test_control_tokens_are_skipped_user_tokens_are_not_and_padding_is_nothing():
    tokenizer = load_tokenizer(gguf_metadata(), name="m")
    ids = tokenizer.encode("<|im_start|>ab<think>")
    assert tokenizer.decode(ids) == "ab<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>ab<think>"
    padding = gguf_metadata()["tokenizer.ggml.tokens"].index("[PAD300]")
    assert tokenizer.decode([padding, 10**6]) == ""
    assert tokenizer.token_bytes(padding) == b""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "deepseek"}, r"tokenizer \('gpt2', pre 'deepseek'\) is not supp"),
        (
            {"tokenizer.ggml.model": "llama"},
            r"tokenizer \('llama', pre 'smollm'\) is not supported",
        ),
        ({"tokenizer.ggml.merges": ["no such"]}, "its tokenizer is corrupt"),
        ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "its tokenizer is corrupt"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "its tokenizer is corrupt .*IndexError"),
        ({"tokenizer.ggml.pre": ["smollm"]}, r"pre \['smollm'\]\) is not supported"),
    ],
)
def test_unknown_and_corrupt_gguf_tokenizers_are_refused(changes, message):
    with pytest.raises(ModelFileError, match=message):
        load_tokenizer(gguf_metadata(**changes), name="m")


def test_bytes_that_are_no_utf8_are_refused():
    tokenizer = load_tokenizer(gguf_metadata(), name="m")
    text = b"ab\xff".decode("utf-8", "surrogateescape")
    with pytest.raises(
        ValueError, match=r"not valid UTF-8 at character 2 \('\\udcff'\); pass UTF-8"
    ):
        tokenizer.encode(text)


# Tokenizers from folders.


def byte_level_backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """As Llama 2's tokenizer.json: spaces are ▁, unknown characters fall back to bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "▁a", "▁b", "你"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    return backend


def write_tokenizer(folder, backend, *, template_file=None, **config):
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template_file is not None:
        (folder / "chat_template.jinja").write_text(template_file)
    return load_tokenizer(folder, name="m")


def test_a_folder_gives_its_special_tokens_and_template(tmp_path):
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": False,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    tokenizer = write_tokenizer(tmp_path, byte_level_backend(), **config)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x"
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}])[0] == 256


def test_a_template_file_wins_over_the_config(tmp_path):
    tokenizer = write_tokenizer(
        tmp_path, byte_level_backend(), template_file="file", chat_template="config"
    )
    assert tokenizer.apply_chat_template([]) == "file"


def test_the_default_of_several_templates_is_taken(tmp_path):
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    tokenizer = write_tokenizer(tmp_path, byte_level_backend(), chat_template=several)
    assert tokenizer.apply_chat_template([]) == "d"


def test_settings_left_from_training_do_not_cut_or_pad_prompts(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    tokenizer = write_tokenizer(tmp_path, backend)
    assert len(tokenizer.encode("abcdef")) == 6
    assert len(tokenizer.encode("a")) == 1


def test_folders_without_a_readable_tokenizer_are_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"has no tokenizer.json; save the model's tokenizer"):
        load_tokenizer(tmp_path, name="m")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelFileError, match=r"tokenizer.json: cannot be read .*truncated or"):
        load_tokenizer(tmp_path, name="m")


# Chat templates.


def test_a_missing_template_says_what_to_do():
    tokenizer = load_tokenizer(
        gguf_metadata(**{"tokenizer.chat_template": None}), name="base-model"
    )
    assert not tokenizer.has_chat_template
    message = "base-model has no chat template; prompt it with plain text, or choose a model"
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_options_reach_the_template():
    source = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    template = ChatTemplate(source, name="m")
    assert template.render([], enable_thinking=False) == "<think></think>"
    assert template.render([]) == ""


def test_templates_find_the_helpers_they_rely_on():
    source = (
        "{%- for m in messages %}\n"
        "    {%- if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "    {%- generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{%- endfor %}\n"
        "{{ strftime_now('%Y') | length }} {{ tools is none }}"
    )
    messages = [{"role": "skip"}, {"role": "tool", "content": "é<>&"}]
    rendered = ChatTemplate(source, name="m").render(messages)
    assert rendered == '{"role": "tool", "content": "é<>&"}4 True'


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'x' + messages[0]['content'] }}", "content|Undefined"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].role / 2 }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_refuses_is_quoted(source, reason):
    template = ChatTemplate(source, name="m")
    with pytest.raises(
        ValueError, match=f"the chat template of m refuses the messages .*({reason})"
    ):
        template.render([{"role": "user"}])


@pytest.mark.parametrize("message", [{"role": "usr", "content": ""}, {"content": ""}], ids=str)
def test_a_role_that_nobody_knows_is_refused(message):
    """A template would write it as it is, and the model would never have seen it."""
    template = ChatTemplate(CHATML, name="m")
    sentence = (
        f"message 1 has the role {message.get('role')!r}; it must be one of assistant, developer, "
        "function, system, tool, user, or one that the chat template of m names"
    )
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        template.render([{"role": "user", "content": "hi"}, message])


def test_a_role_that_the_template_names_is_known():
    template = ChatTemplate("{% if messages[0].role == 'critic' %}yes{% endif %}", name="m")
    assert template.render([{"role": "critic", "content": ""}]) == "yes"


def test_a_template_that_is_no_jinja_is_refused():
    message = r"m: its chat template is not valid jinja2 \(line 2: "
    with pytest.raises(ModelFileError, match=message):
        ChatTemplate("a\n{% if %}", name="m")


# Text that grows (F32): any chunking joins to the whole text, and no piece ends half a character.


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:stop] for start, stop in itertools.pairwise(edges)]


def grow(tokenizer, ids, cuts, skip) -> list[str]:
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    deltas = [stream.push(chunk) for chunk in chunked(ids, cuts)]
    return [*deltas, stream.flush()]


BYTE_LEVEL = load_tokenizer(gguf_metadata(), name="m")
SENTENCEPIECE = Tokenizer(sentencepiece_backend(), name="m")
TEXTS = st.text(st.sampled_from("ab 你🙂é\n\N{REPLACEMENT CHARACTER}"), max_size=12)
CUTS = st.lists(st.integers(0, 40), max_size=8)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=CUTS)
def test_a_text_grows_without_half_characters(tokenizer, text, cuts):
    ids = tokenizer.encode(text)
    deltas = grow(tokenizer, ids, cuts, skip=True)
    assert "".join(deltas) == tokenizer.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 275), max_size=14), cuts=CUTS, skip=st.booleans())
def test_any_ids_grow_to_their_whole_text(tokenizer, ids, cuts, skip):
    """Also bytes that are no UTF-8, ids without a token, and control tokens between bytes."""
    deltas = grow(tokenizer, ids, cuts, skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_of_four_bytes_comes_when_it_is_whole():
    stream = BYTE_LEVEL.detokenizer()
    first, second, third, fourth = BYTE_LEVEL.encode("🙂")
    assert [stream.push([first, second]), stream.push([third]), stream.push([fourth])] == [
        "",
        "",
        "🙂",
    ]
    assert (stream.push([first]), stream.flush()) == ("", "\N{REPLACEMENT CHARACTER}")


def test_a_space_before_a_word_survives_a_control_token():
    word = SENTENCEPIECE.token_id("▁a")
    stop = SENTENCEPIECE.token_id("</s>")
    stream = SENTENCEPIECE.detokenizer()
    assert [stream.push([word]), stream.push([stop]), stream.push([word])] == ["a", "", " a"]


@pytest.mark.network
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_smollm2_answers_grow_to_their_whole_text(smollm2, size, skip):
    """F32: the reference answers and one with characters that span tokens, in chunks."""
    answers = [entry["greedy_ids"] for entry in REFERENCE["chat_greedy"]]
    for ids in [*answers, smollm2.encode("naïve 你好 🙂🙃 ½")]:
        stream = smollm2.detokenizer(skip_special_tokens=skip)
        deltas = [stream.push(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(deltas)
        assert "".join(deltas) + stream.flush() == smollm2.decode(ids, skip_special_tokens=skip)


def test_content_in_parts_is_joined_and_what_is_no_text_is_refused():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", name="toy")

    def render(content, **more):
        return template.render([{"role": "assistant", "content": content, **more}])

    parts = [{"type": "text", "text": "a"}, {"text": "b"}, "c"]
    assert (render("x"), render(parts), render([])) == ("[x]", "[a\nb\nc]", "[]")
    assert render(None, tool_calls=[{}]) == "[None]"
    assert template.render([{"role": "user"}]) == "[]"
    image = {"type": "image_url", "image_url": {"url": "u"}}
    for content in (None, 7, {"a": 1}, [None], [{"type": "text"}], ["a", image]):
        with pytest.raises(ValueError, match=r"message 0 has the content .* it must be text, or"):
            render(content)
