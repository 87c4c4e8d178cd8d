"""Every decoder against the plain model's argmax and the exact nucleus, whatever the model's folder says."""

import json
from dataclasses import replace

import pytest
import reference
import torch
from batches import completions
from test_logprobs import LargestTensor
from transformers import TopPLogitsWarper

import pspo.rollout.graphs
from pspo.config import AlgorithmConfig, ModelConfig, RolloutConfig
from pspo.model import autocast, load_tokenizer, stop_token_ids, token_logprobs
from pspo.rollout import How, PolicySampler, Prompts, Sampling, encode_prompts, generate, make_sampling
from pspo.rollout.drawing import Generators, in_nucleus, sample_nucleus, sample_race
from pspo.rollout.sampler import find_decoder
from pspo.run.checkpointer import save_model
from pspo.tasks import Problem

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9], [11]]
SAMPLING = Sampling(stop_ids=[60, 61], pad_id=62, temperature=0.9, top_p=0.85, max_completion_tokens=12)
GREEDY = replace(SAMPLING, temperature=0.0)
OWN_LOOP = ["pspo", "graphs"]
DECODERS = [*OWN_LOOP, "hf"]
each_decoder = pytest.mark.parametrize("decoder", DECODERS)
HOSTILE = {
    "sampling": {"do_sample": True, "top_k": 3, "top_p": 0.2, "temperature": 0.1, "repetition_penalty": 1.5},
    "lengths": {"max_length": 5, "max_new_tokens": 2, "min_new_tokens": 11, "min_length": 15, "max_time": 1e-4},
    "tokens": {
        "bad_words_ids": [[5], [6, 7]], "suppress_tokens": list(range(8, 40)), "begin_suppress_tokens": [40, 41],
        "forced_bos_token_id": 3, "forced_eos_token_id": 4, "eos_token_id": list(range(64)), "pad_token_id": 1,
        "sequence_bias": [[[5], 10.0]],
    },
    "processors": {
        "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.3, "exponential_decay_length_penalty": [2, 1.5],
        "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "guidance_scale": 3.0, "num_beams": 4, "num_return_sequences": 2,
        "return_dict_in_generate": True, "use_cache": False, "stop_strings": ["a"], "prompt_lookup_num_tokens": 3,
    },
}  # fmt: skip


@torch.no_grad()
def argmax_loop(model, prompt, sampling):
    """Greedy decoding of one unpadded prompt from whole forward passes, without a cache."""
    ids = list(prompt)
    for _ in range(sampling.max_completion_tokens):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] in sampling.stop_ids:
            break
    return ids[len(prompt) :]


def seeded(seed, *args, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return generate(*args, **options)


# ---------------------------------------------------------------- greedy

GREEDY_CASES = {
    "prompts of many lengths": (PROMPTS, {}),
    "max_rows": (PROMPTS, {"max_rows": 3}),
    "one prompt": (PROMPTS[:1], {}),
    "prompts of one length": ([[1, 2, 3], [4, 5, 6]], {}),
    "prompts that begin alike": ([[*range(20, 40), *prompt] for prompt in PROMPTS], {}),
}


@pytest.mark.parametrize(("prompts", "options"), GREEDY_CASES.values(), ids=GREEDY_CASES)
@pytest.mark.parametrize("name", ["Qwen2", "Llama", "Qwen3", "Gemma2", "GPT2"])
def test_greedy_is_the_argmax_of_the_plain_model(monkeypatch, tiny_model, tokenizer, name, prompts, options):
    monkeypatch.setattr(pspo.rollout.graphs, "GPU_CHECK_EVERY", 2)  # so that rows leave early
    monkeypatch.setattr(pspo.rollout.graphs, "MIN_ROWS", 1)
    model, sampling = tiny_model(name), replace(GREEDY, max_completion_tokens=20, **options)
    free = [argmax_loop(model, prompt, replace(sampling, stop_ids=())) for prompt in prompts]
    sampling = replace(sampling, stop_ids=sorted({free[0][4], free[-1][11]}))  # rows end at different times
    expected = [argmax_loop(model, prompt, sampling) for prompt in prompts]
    for decoder in DECODERS if name != "Gemma2" else ("pspo", "hf"):  # graphs is refused for its sliding windows
        rollout = generate(model, tokenizer, prompts, replace(sampling, decoder=decoder), group_size=2)
        assert completions(rollout) == [row for row in expected for _ in range(2)], decoder
        assert rollout.terminated.tolist() == [row[-1] in sampling.stop_ids for row in expected for _ in range(2)]
        assert rollout.terminated.any()
        assert (rollout.completion_ids[~rollout.completion_mask] == sampling.pad_id).all()
        assert rollout.completion_ids.shape[1] == max(map(len, expected))  # nothing is decoded beyond the last


def test_a_common_beginning_is_computed_once_and_no_copy_of_the_output_embedding_for_each_prompt(tiny_model, tokenizer):
    model = tiny_model(vocab_size=2000)
    tokens = []
    model.get_input_embeddings().register_forward_hook(lambda _, ids, out: tokens.append(ids[0].numel()))
    prompts = [[*range(20, 40), *prompt] for prompt in PROMPTS]
    with autocast("bf16", model.device), LargestTensor() as largest:
        generate(model, tokenizer, prompts, replace(GREEDY, stop_ids=(), max_completion_tokens=3), group_size=2)
    assert tokens == [20, 4 * 8, 8, 8]
    assert largest.numel == model.lm_head.weight.numel()


def test_graphs_draw_the_same_whatever_was_drawn_before(tiny_model, tokenizer):
    """And the positions of rows that decode nothing, one of 10 here, stay in the model's range."""
    sampling = replace(SAMPLING, decoder="graphs", max_completion_tokens=20, stop_ids=(), logprobs=True)
    fresh, used = tiny_model(), tiny_model()
    generate(used, tokenizer, [[1] * 90] * 20, replace(sampling, max_completion_tokens=30))
    for _ in range(3):
        one, other = (seeded(5, model, tokenizer, [[1, 2, 3]] * 9, sampling) for model in (fresh, used))
        assert torch.equal(one.completion_ids, other.completion_ids)
        assert torch.equal(one.sampler_logprobs, other.sampler_logprobs)
    assert pspo.rollout.graphs.GRAPH_DECODERS[fresh].positions.max() < 3 + 20


TOP_PS = [0.85, 1.0]


@pytest.fixture(scope="module")
def undisturbed(tiny_model):
    """What a model whose folder says nothing samples, by decoder and top_p."""
    args = tiny_model(), load_tokenizer(ModelConfig()), PROMPTS
    samplings = [replace(SAMPLING, decoder=decoder, top_p=top_p) for decoder in DECODERS for top_p in TOP_PS]
    return {(how.decoder, how.top_p): completions(seeded(5, *args, how, group_size=4)) for how in samplings}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_generation_settings_change_nothing(tiny_model, model_folder, load, tokenizer, undisturbed, name):
    clean = tiny_model()
    hostile, folder = HOSTILE[name], model_folder(clean)
    (folder / "generation_config.json").write_text(json.dumps(hostile))
    model = load(folder)
    theirs = model.generation_config
    assert theirs.to_dict().items() >= hostile.items()  # it was loaded

    likeliest = [argmax_loop(clean, prompt, GREEDY) for prompt in PROMPTS]
    for decoder in DECODERS if name == "sampling" else ["hf"]:  # the one that reads such settings
        assert completions(generate(model, tokenizer, PROMPTS, replace(GREEDY, decoder=decoder))) == likeliest, decoder
        for top_p in TOP_PS:
            sampling = replace(SAMPLING, decoder=decoder, top_p=top_p)
            sampled = completions(seeded(5, model, tokenizer, PROMPTS, sampling, group_size=4))
            assert sampled == undisturbed[decoder, top_p]
            assert len(set(map(tuple, sampled))) > 4  # it did sample

    assert model.generation_config is theirs
    save_model(model, tokenizer, folder.parent / "saved")
    saved = json.loads((folder.parent / "saved/generation_config.json").read_text())
    assert saved == saved | hostile | {"eos_token_id": stop_token_ids(model, tokenizer)}


@each_decoder
def test_stop_strings_end_completions_and_are_part_of_them(load, tokenizer, decoder):
    """Where a string first ends in the decoded text; over tokens' borders, and not where it begins in the prompt."""
    policy, strings = load("tiny-base"), ["= 1", "\n#", "packs"]
    prompts = encode_prompts(tokenizer, [f"Tom has {n} packs of 4. He eats 3. How many?" for n in range(2, 12)])
    prompts[0] = [*prompts[0], *tokenizer("2 * 4 =")["input_ids"]]  # the string's own beginning
    sampling = replace(GREEDY, stop_ids=[tokenizer.eos_token_id], pad_id=tokenizer.pad_token_id, decoder=decoder)
    sampling = replace(sampling, max_completion_tokens=24)
    free = generate(policy, tokenizer, prompts, sampling, 2)
    cut = generate(policy, tokenizer, prompts, replace(sampling, stop_strings=strings), 2)
    expected = []
    for ids in completions(free):
        texts = [tokenizer.decode(ids[: t + 1], skip_special_tokens=False) for t in range(len(ids))]
        ends = [t for t, text in enumerate(texts) if any(string in text for string in strings)]
        expected.append(ids[: ends[0] + 1] if ends else ids)
    assert completions(cut) == expected
    assert sum(map(len, expected)) < free.completion_mask.sum()
    assert cut.terminated.all()
    assert all(any(string in text for text in cut.texts) for string in strings[:2])


def test_what_a_decoder_cannot_do_is_refused(tiny_model, tokenizer):
    with pytest.raises(ValueError, match=r"--rollout\.decoder graphs: graphs need .* choose another"):
        make_sampling(tiny_model("Gemma2"), tokenizer, RolloutConfig(decoder="graphs"))
    lfm2 = tiny_model("Lfm2", layer_types=["conv", "full_attention"])
    for decoder in OWN_LOOP:
        with pytest.raises(ValueError, match=rf"decoder {decoder}: {decoder} .* choose another"):
            make_sampling(lfm2, tokenizer, RolloutConfig(decoder=decoder))
    assert find_decoder(lfm2, "auto", logprobs=False, nucleus=False) == "hf"
    assert find_decoder(tiny_model("Gemma2"), "auto", logprobs=False, nucleus=False) == "pspo"
    with pytest.raises(ValueError, match=r"--rollout\.decoder auto: pspo does not .*; hf records no log-probs"):
        find_decoder(lfm2, "auto", logprobs=True, nucleus=False)
    small = load_tokenizer(ModelConfig(name_or_path="tiny-base"))
    small.pad_token_id = 0
    correcting = AlgorithmConfig(correction="token_truncate")  # an engine's log-probs: the policy only decodes greedily
    assert make_sampling(lfm2, small, RolloutConfig(engine="engines.Copy"), correcting).decoder == "hf"


# ---------------------------------------------------------------- sampled


class Scarce(torch.nn.Module):
    """A model that runs out of memory above a number of rows."""

    def __init__(self, model, rows):
        super().__init__()
        self.model, self.rows, self.config, self.device = model, rows, model.config, model.device

    def forward(self, input_ids, **options):
        if len(input_ids) > self.rows:
            raise torch.OutOfMemoryError
        return self.model(input_ids=input_ids, **options)


@pytest.mark.parametrize("decoder", OWN_LOOP)
def test_out_of_memory_draws_as_with_fewer_rows_from_the_start(tiny_model, tokenizer, decoder):
    model, prompts = tiny_model(), [*PROMPTS, *PROMPTS[:1]]
    sampling = replace(SAMPLING, decoder=decoder, max_rows=12)
    expected = seeded(7, model, tokenizer, prompts, replace(sampling, max_rows=4), group_size=2)
    other = seeded(7, model, tokenizer, prompts, sampling, group_size=2)
    assert completions(other) != completions(expected)
    with pytest.warns(UserWarning, match="out of memory: drawing as with --rollout.max_rows"):
        drawn = seeded(7, Scarce(model, 4), tokenizer, prompts, sampling, group_size=2)
    assert completions(drawn) == completions(expected)
    generators, resumed = (Generators(torch.device("cpu"), 0) for _ in range(2))
    sampler = PolicySampler(tokenizer, memory=generators)  # with torch's numbers, as an evaluation draws
    with pytest.warns(UserWarning, match="out of memory"):
        sampler.draw(Prompts([Problem("")] * len(prompts), prompts), 2, How(sampling, Scarce(model, 4)))
    resumed.load_state_dict(generators.state_dict())  # a run stays at fewer rows, and so does one that resumes it
    drawn = seeded(7, model, tokenizer, prompts, sampling, group_size=2, memory=resumed)
    assert completions(drawn) == completions(expected)
    expected = seeded(7, Scarce(model, 1), tokenizer, prompts, replace(sampling, max_rows=1), group_size=2)
    with pytest.warns(UserWarning, match="out of memory"):  # down to less than a group
        drawn = seeded(7, Scarce(model, 1), tokenizer, prompts, sampling, group_size=2)
    assert completions(drawn) == completions(expected)
    with pytest.warns(UserWarning, match="out of memory"), pytest.raises(torch.OutOfMemoryError):
        generate(Scarce(model, 0), tokenizer, prompts, sampling, group_size=2)


@each_decoder
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0.6, 0.85, 0), (1, 1.0, 0), (0.3, 1.0, 0), (1, 0.8, 20)])
def test_first_tokens_come_from_the_exact_nucleus(tiny_model, tokenizer, temperature, top_p, top_k, decoder):
    model = tiny_model(initializer_range=0.12, seed=3, vocab_size=100)
    logits = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1] / temperature
    exact = reference.nucleus(logits, top_p, top_k)
    assert 5 < (exact > 0).sum() <= (top_k or 100)
    cuts = {"top_p": top_p, "top_k": top_k}
    sampling = replace(SAMPLING, temperature=temperature, max_completion_tokens=1, **cuts)
    rollout = seeded(0, model, tokenizer, PROMPTS[:1], replace(sampling, decoder=decoder), group_size=4000)
    reference.assert_drawn_from(exact, rollout.completion_ids[:, 0])


@each_decoder
def test_later_tokens_come_from_the_exact_conditional(tiny_model, tokenizer, decoder):
    """The third token, given each of the likeliest beginnings: the cache and the groups' rows stay together."""
    model = tiny_model(initializer_range=0.25, seed=4)
    sampling = replace(SAMPLING, temperature=0.8, top_p=0.9, max_completion_tokens=3, max_rows=6000, decoder=decoder)
    rollout = seeded(0, model, tokenizer, PROMPTS[:2], sampling, group_size=3000)
    tested = 0
    for prompt, rows in zip(PROMPTS, rollout.completion_ids.split(3000), strict=False):
        beginnings, counts = rows[:, :2].unique(dim=0, return_counts=True)
        for beginning in beginnings[counts >= 60].tolist():
            if not set(beginning) & set(sampling.stop_ids):
                tested += 1
                logits = model(input_ids=torch.tensor([prompt + beginning])).logits[0, -1]
                thirds = rows[(rows[:, :2] == torch.tensor(beginning)).all(dim=1), 2]
                reference.assert_drawn_from(reference.nucleus(logits / 0.8, 0.9), thirds)
    assert tested > 5


SHAPES = [(20, 1.0), (64, 0.5), (400, 3.0), (400, 0.3), (1000, 0.1)]  # vocabulary, spread of the logits


@pytest.mark.parametrize(
    ("sampler", "vocabulary", "spread", "top_p"),
    [
        *((sample_nucleus, *shape, top_p) for shape in SHAPES for top_p in (0.3, 0.85, 1.0)),
        (sample_nucleus, 400, 0.3, 0.05),
        (sample_nucleus, 400, 0.1, 0.02),  # of which half the rows are not drawn within `MAX_TRIES`
        *((sample_race, *shape, 0.85) for shape in SHAPES),
        *((sample_race, 64, 0.5, top_p) for top_p in (0.3, 1.0)),
        (sample_race, 1000, 0.1, 0.3),
    ],
)
def test_sampled_frequencies_are_the_exact_nucleus(sampler, vocabulary, spread, top_p):
    torch.manual_seed(vocabulary)
    logits = spread * torch.randn(vocabulary)
    probs = logits.softmax(dim=0).expand(5000, -1)
    tokens = torch.cat([sampler(probs, top_p) for _ in range(4)])
    reference.assert_drawn_from(reference.nucleus(logits, top_p), tokens)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5])
def test_the_nucleus_is_the_librarys(top_p):
    torch.manual_seed(0)
    logits = 2 * torch.randn(200, 300)
    warped = TopPLogitsWarper(top_p)(None, logits)
    assert torch.equal(in_nucleus(logits.softmax(dim=1), top_p), warped.isfinite())


@pytest.mark.parametrize("sampler", [sample_nucleus, sample_race])
@pytest.mark.parametrize(("probs", "top_p", "nucleus"), [
    ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1, 2, 3}),
    ([0.1, 0.4, 0.1, 0.3, 0.1], 0.75, {0, 1, 2, 3, 4}),  # 0.4 and 0.3 are 0.7: one of the 0.1s, and so all
    ([0.1, 0.4, 0.1, 0.3, 0.1], 0.65, {1, 3}),
    ([0.25, 0.5, 0.25], 0.5, {1}),
])  # fmt: skip
def test_equally_likely_tokens_at_the_edge_belong_together(sampler, probs, top_p, nucleus):
    assert set(sampler(torch.tensor([probs]).expand(2000, -1), top_p).tolist()) == nucleus


def test_nothing_is_left_out_at_top_p_1():
    """Tokens so rare that the mass above them rounds to 1; a float32 sum of probabilities would never reach them."""
    torch.manual_seed(0)
    logits = torch.zeros(1, 50_000)
    logits[0, 0] = 17.0
    drawn = torch.cat([sample_nucleus(logits.softmax(dim=1).expand(100, -1), 1.0) for _ in range(10)])
    expected = 49_999 / (49_999 + 2.718281828459045**17)  # 0.2%
    assert abs((drawn != 0).float().mean().item() - expected) < 5 * (expected / len(drawn)) ** 0.5
    assert (drawn != 0).any()


# ---------------------------------------------------------------- log-probs of what was sampled


@pytest.mark.parametrize("decoder", OWN_LOOP)
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"max_rows": 4}, {"temperature": 0.0}], ids=str)
def test_log_probs_of_sampled_tokens_are_the_models_own(tiny_model, tokenizer, options, decoder):
    """At the temperature, and before nucleus and top_k take anything away."""
    model = tiny_model()
    sampling = replace(SAMPLING, stop_ids=[5, 30, 41, 50], decoder=decoder, logprobs=True, **options)
    rollout = seeded(0, model, tokenizer, PROMPTS, sampling, group_size=3)
    expected = token_logprobs(model, *rollout.token_ids, sampling.temperature or 1.0)
    torch.testing.assert_close(rollout.sampler_logprobs, expected.detach(), rtol=0, atol=2e-5)
    assert expected.min() < -0.01
    some = torch.tensor([4, 1])
    rows = rollout.rows(some)
    assert torch.equal(rows.sampler_logprobs, rollout.sampler_logprobs[some, : rows.completion_ids.shape[1]])
    assert generate(model, tokenizer, PROMPTS, replace(sampling, logprobs=False)).sampler_logprobs is None
