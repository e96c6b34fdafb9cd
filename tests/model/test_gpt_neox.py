"""The plain setting against an independent GPT with rotary positions: GPT-NeoX from transformers, on copied weights."""

import pytest
import torch

from helpers import named, random_ids
from thoughtbubbles.model.transformer import Thoughtbubbles

transformers = pytest.importorskip("transformers")


def neox_reference(model: Thoughtbubbles) -> torch.nn.Module:
    config = model.config
    reference = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            intermediate_size=4 * config.width,
            max_position_embeddings=config.block_size,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            use_parallel_residual=False,
            hidden_act="gelu",
            layer_norm_eps=1e-5,
            attention_bias=True,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).double()
    heads, size = config.n_head, config.head_size

    def interleave(qkv: torch.Tensor) -> torch.Tensor:
        """NeoX stores q, k, v head by head; we store all queries, then all keys, then all values."""
        return qkv.unflatten(0, (3, heads, size)).transpose(0, 1).flatten(0, 2)

    ours = model.state_dict()
    theirs = {"gpt_neox.embed_in.weight": ours["embedding.weight"]}
    for kind in ("weight", "bias"):
        theirs[f"gpt_neox.final_layer_norm.{kind}"] = ours[f"final_norm.{kind}"]
        for i in range(config.n_layer):
            to, source = f"gpt_neox.layers.{i}", f"blocks.{i}"
            theirs[f"{to}.input_layernorm.{kind}"] = ours[f"{source}.attention_norm.{kind}"]
            theirs[f"{to}.attention.query_key_value.{kind}"] = interleave(ours[f"{source}.attention.qkv.{kind}"])
            theirs[f"{to}.attention.dense.{kind}"] = ours[f"{source}.attention.out.{kind}"]
            theirs[f"{to}.post_attention_layernorm.{kind}"] = ours[f"{source}.mlp_norm.{kind}"]
            theirs[f"{to}.mlp.dense_h_to_4h.{kind}"] = ours[f"{source}.mlp.up.{kind}"]
            theirs[f"{to}.mlp.dense_4h_to_h.{kind}"] = ours[f"{source}.mlp.down.{kind}"]
    reference.get_output_embeddings().weight.data = ours["embedding.weight"]  # the name differs between versions
    missing, unexpected = reference.load_state_dict(theirs, strict=False)
    assert not unexpected
    assert len(missing) == 1, "all but the output projection, which is set already"
    return reference.eval()


@pytest.mark.parametrize("tokens", [1, 17, 32])
def test_plain_setting_is_gpt_neox(tokens):
    torch.manual_seed(0)
    model = Thoughtbubbles(named("nano-plain", width=24, n_head=3)).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = random_ids(model.config, 2, tokens)
    with torch.no_grad():
        expected = neox_reference(model)(ids).logits
        found = model(ids, want=("logits",)).logits
    # NeoX computes rotation angles and softmax in float32 whatever the model's dtype; nothing else separates the two.
    assert (found - expected).norm() / expected.norm() < 1e-6
