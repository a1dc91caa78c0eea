"""Heads and layers that were trained draft in the engine what they learnt; bad input is refused."""

import pytest
import torch
from safetensors.torch import load_file

from experiments.train_draft import __main__ as entry
from experiments.train_draft import eagle, medusa
from experiments.train_draft.__main__ import run
from experiments.train_draft.prompts import TASKS, built_in, from_file
from experiments.train_draft.settings import TrainSettings
from experiments.train_draft.texts import Text, read
from realengine.model.architecture import Architecture
from realengine.speculation.checkpoints import load_eagle, load_heads
from tests.realengine.small_models import CONFIGS, LLAMA
from tests.realengine.speculation.plain_layers import Plain, context_of, whole_states

torch.set_num_threads(1)

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [20, 30], [5, 6, 7, 8, 9, 11], [40], [60, 61, 62, 50]]


def settings_of(out, config="llama", **changed):
    """Returns settings for a random model; they train six short texts in one batch of heads."""
    small = {
        "model": Architecture.from_hf(CONFIGS[config]),
        "num_heads": 2,
        "num_drafts": (2,),
        "num_tokens": 24,
        "num_measured_tokens": 24,
        "learning_rate": 1e-2,
        "seed": 1,
    }
    return TrainSettings(out=out, **small | changed)


@pytest.mark.parametrize("config", ["llama", "qwen2"])
def test_checkpoints_are_read_and_change_no_output(tmp_path, config):
    settings = settings_of(tmp_path / "out", config, epochs=2, num_drafts=(1, 2))
    lines = []
    plain, *results = run(settings, PROMPTS, PROMPTS[:3], lines.append)
    assert [(result.method, result.num_drafts) for result in results] == [
        ("medusa", 1),
        ("medusa", 2),
        ("eagle", 1),
        ("eagle", 2),
    ]
    for result in results:
        assert result.outputs == plain.outputs
        assert result.num_passes > 0
        assert len(result.acceptance) == result.num_drafts
        assert result.mean_length == 1 + sum(result.acceptance)
    assert lines[-5].split()[2:] == [f"{plain.tokens_per_s:.1f}", "1.00", "1.00", "3/3"]
    assert lines[-1].startswith("eagle, K = 2")


@pytest.mark.slow
def test_what_was_learnt_by_heart_is_accepted(tmp_path):
    """Measured on the prompts of the training; a wrong row, place or layout would leave a few percent."""
    _, heads, layer = run(settings_of(tmp_path / "out", epochs=150), PROMPTS, PROMPTS, print)
    assert min(heads.acceptance) > 0.8
    assert layer.acceptance[0] > 0.9
    assert layer.acceptance[1] > 0.1  # its own states are too far from those of a target with random weights


@pytest.mark.parametrize("train", [medusa.train, eagle.train])
def test_the_loss_falls(tmp_path, train):
    settings = settings_of(tmp_path, epochs=5)
    draw = torch.Generator().manual_seed(0)
    texts = [Text(torch.randint(0, 97, (20,), generator=draw).tolist(), 4) for _ in range(12)]
    for losses in train(read(texts, settings), settings, tmp_path / "out", lambda line: None):
        assert len(losses) == 5
        assert losses[-1] < losses[0]


def corpus_of(tmp_path):
    """Returns settings and a corpus whose target is that of `context_of`."""
    context, _ = context_of()
    texts = [Text([3, 1, 4, 1, 5, 9, 2, 6], 3), Text([2, 7, 1, 8], 2), Text([5, 5], 2)]
    corpus = read(texts, settings_of(tmp_path / "out"))
    return context, corpus


def test_rows_of_a_head_begin_at_the_last_token_of_the_prompt(tmp_path):
    _, corpus = corpus_of(tmp_path)
    assert medusa.rows_of(corpus, 0).tolist() == [2, 3, 4, 5, 9]  # texts begin at rows 0, 8 and 12
    assert medusa.rows_of(corpus, 1).tolist() == [2, 3, 4]
    targets = corpus.vocabulary_U[corpus.words_T[medusa.rows_of(corpus, 0) + 2]]
    assert targets.tolist() == [5, 9, 2, 6, 8]
    with pytest.raises(ValueError, match="head 7: no answer is long enough"):
        medusa.rows_of(corpus, 7)


def test_hidden_states_of_texts_together_are_those_of_each_alone(tmp_path):
    _, corpus = corpus_of(tmp_path)
    for start, text in zip(corpus.starts, corpus.texts, strict=True):
        alone = read([text], settings_of(tmp_path / "out")).hidden_TH
        torch.testing.assert_close(corpus.hidden_TH[start : start + len(text.tokens)], alone)


def test_an_untrained_head_is_the_targets(tmp_path):
    context, corpus = corpus_of(tmp_path)
    head = medusa.Head(context.architecture.hidden_size, corpus.hidden_TH.device)
    assert torch.equal(head(corpus.hidden_TH), corpus.hidden_TH)


def test_heads_are_stored_in_the_published_layout(tmp_path):
    context, corpus = corpus_of(tmp_path)
    settings = settings_of(tmp_path / "out", epochs=3)
    medusa.train(corpus, settings, settings.out, lambda line: None)
    stored = load_file(settings.out / medusa.FILE)
    names = ("0.linear.weight", "0.linear.bias", "1.weight")
    assert set(stored) == {f"{head}.{name}" for head in (0, 1) for name in names}
    (((weight, bias),), projection), _ = load_heads(settings.out, context, 2)
    assert weight.shape == (48, 48)
    assert bias.abs().sum() > 0
    assert projection.shape == (97, 48)


def test_the_layer_computes_in_training_what_it_computes_in_the_engine(tmp_path):
    context, corpus = corpus_of(tmp_path)
    settings = settings_of(tmp_path / "out", epochs=1)
    eagle.train(corpus, settings, settings.out, lambda line: None)
    weights = load_eagle(settings.out, context)
    trained = eagle.EagleLayer(context.architecture, 32, context.device, seed=0)
    stored = load_file(settings.out / eagle.FILE)
    assert stored.keys() == trained.trained.keys()
    for name, tensor in stored.items():
        trained.trained[name].data.copy_(tensor)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    hidden = whole_states(context, tokens[:-1]).hidden_TH
    found = trained(context.target.embed(torch.tensor(tokens[1:]))[None], hidden[None])[0]
    expected = Plain("eagle", context, weights).run(tokens[1:], hidden.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_prompts_of_the_measurement_are_not_trained_on(tmp_path):
    train, held_out = built_in(400, 40, seed=3)
    assert len({*train, *held_out}) == 440
    assert len(TASKS) == 12
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n two \nthree\none\n")
    train, held_out = from_file(file, 5, 1, seed=0)
    assert sorted([*train, *held_out]) == ["one", "three", "two"]
    assert len(held_out) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-drafts", "0"], "num_drafts=0: must be >= 1"),
        (["--num-drafts", "4"], "num_drafts=4: must be <= num_heads=3, because each Medusa head drafts one"),
        (["--num-heads", "0"], "num_heads=0: must be >= 1"),
        (["--learning-rate", "nan"], "learning_rate=nan: must be a finite number > 0"),
        (["--temperature", "-1"], "temperature=-1.0: must be a finite number >= 0; 0 is greedy"),
        (["--num-prompts", "9999"], "num_prompts=9999: must be <= 480; prompts of your own may be more"),
        (["--model", "nowhere"], "nowhere"),
        (["--prompts", "nowhere.txt"], "prompts=nowhere.txt: cannot be read"),
        (["--prompts", "empty.txt"], "empty.txt: has 0 prompts, and must have more than num_held_out=12"),
        (["--out", "."], "out=.: must be a new or an empty folder"),
    ],
)
def test_rejects_settings_in_one_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n\n")
    assert entry.main(["--out", "new", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("prompts", [[], [[]], [[1, 2], []]])
def test_rejects_empty_prompts(prompts, tmp_path):
    with pytest.raises(ValueError, match="prompts: must be at least one, and none of them empty"):
        run(settings_of(tmp_path / "out"), prompts, PROMPTS, print)


def test_rejects_prompts_that_do_not_fit_the_model(tmp_path):
    too_long = LLAMA["max_position_embeddings"]
    with pytest.raises(ValueError, match="max_model_len=153: must be <= 128"):
        run(settings_of(tmp_path / "out"), [[1] * too_long], PROMPTS, print)
