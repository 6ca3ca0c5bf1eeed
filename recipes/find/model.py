"""The policy of the find task: a causal model of about 0.4 M parameters and its word-level tokenizer, made on the spot.

`build(folder, seed)` writes a folder that `transformers` loads: config, tokenizer with chat template, weights. The
same seed gives the same weights. Embeddings are untied, so that a tensor written is a tensor read.
"""

from __future__ import annotations

from pathlib import Path

from sandlot.config import locate

SPECIAL = ["<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>"]

# One line a message: the role, the words, the end. A conversation only ever grows at its end, so what was rendered
# once never has to be encoded again.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|assistant|>' if m['role'] == 'assistant' else '<|user|>' }} {{ m['content'] }} <|end|> "
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build(folder: Path, seed: int, hidden: int = 96, layers: int = 3) -> None:
    """Write config, tokenizer and fresh weights into `folder`, which exists."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = SPECIAL + locate("task.py:vocabulary", Path(__file__).parent)()
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    # Split at blanks, and around the colon that grep puts between a file and its line.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(":", behavior="isolated")]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<pad>"),
    )
    policy = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # The output starts as the input's copy, not tied to it: copying a word, which is what the task needs, is then
        # learned from fewer examples. 0.1 rather than transformers' 0.02: an answer copied from `grep` is then wrong
        # in 0.5 % of cases after the warm start instead of 3 %.
        policy.model.embed_tokens.weight.normal_(0.0, 0.1)
        policy.lm_head.weight.copy_(policy.model.embed_tokens.weight)
    policy.save_pretrained(folder)
