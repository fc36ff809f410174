"""ullage.torch.patch on tiny random models: the loss and every gradient are the library's own."""

import pytest
import torch
import transformers as hf

import ullage
from ullage.torch import patch, unpatch

SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "llama_tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SIZES, final_logit_softcapping=1.5, attn_implementation="eager")
    ),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SIZES, logits_scaling=8.0)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**SIZES, logit_scale=0.25)),
}


def batch():
    ids = torch.randint(3, 97, (2, 11))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n_items", [None, 17, torch.tensor(17)])
def test_loss_and_gradients_are_the_models_own(name, n_items):
    model = MODELS[name]()
    inputs = batch() | ({} if n_items is None else {"num_items_in_batch": n_items})
    own = model(**inputs)
    own.loss.backward()
    wanted = gradients(model)
    patch(model)
    out = model(**inputs)
    assert out.logits is None
    torch.testing.assert_close(out.loss, own.loss, rtol=1e-6, atol=1e-6)
    out.loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for each, gradient in wanted.items():
        torch.testing.assert_close(found[each], gradient, rtol=1e-4, atol=1e-6, msg=each)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_evaluation_goes_through_the_fused_head_too(name):
    model, inputs = MODELS[name]().eval(), batch()
    with torch.no_grad():
        own, out = model(**inputs), patch(model)(**inputs)
    assert out.logits is None and not out.loss.requires_grad
    torch.testing.assert_close(out.loss, own.loss, rtol=1e-6, atol=1e-6)


def test_logits_only_when_asked_for():
    model = patch(MODELS["gemma2"]()).eval()
    inputs = batch()
    with torch.no_grad():
        own = unpatch(model)(**inputs)
        asked = patch(model)(**inputs, output_logits=True)
        torch.testing.assert_close(asked.logits, own.logits)
        without_labels = model(input_ids=inputs["input_ids"])
        torch.testing.assert_close(without_labels.logits, own.logits)
        assert isinstance(model(**inputs, return_dict=False), tuple)
        assert model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False).shape == (2, 14)


def test_unpatch_gives_the_model_back():
    model = MODELS["llama"]()
    unpatch(patch(model))
    assert "forward" not in vars(model)
    assert model(**batch()).logits is not None


def test_an_adapter_on_the_head_is_refused_not_ignored():
    class Adapter(torch.nn.Linear):
        pass

    model = patch(MODELS["llama"]())
    model.lm_head = Adapter(32, 97, bias=False)
    with pytest.raises(TypeError, match="Adapter"):
        model(**batch())


def test_logits_to_keep_with_labels_is_refused():
    with pytest.raises(ValueError, match="logits_to_keep"):
        patch(MODELS["llama"]())(**batch(), logits_to_keep=1)


def test_options_of_the_loss_are_passed_on():
    own = MODELS["llama"]()
    inputs = batch()
    plain = own(**inputs).loss
    assert patch(own, z_loss=0.1)(**inputs).loss > plain
    with pytest.raises(ullage.UllageError, match="filter_tolerance"):  # on the CPU
        patch(own, filter_tolerance=1e-3)(**inputs)
