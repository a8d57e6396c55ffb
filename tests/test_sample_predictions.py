from __future__ import annotations

import itertools
import sys

import pytest
import torch
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from ranks import run_on_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from training import Training, assert_equal_to_the_bit

from pellucid.engine import DataError, Engine, Events, create_supervised_trainer
from pellucid.handlers import SamplePredictions
from pellucid.handlers.testing import check_handler

TRUE = torch.tensor([0, 1, 2, 0])
PREDICTED = torch.tensor([0, 2, 2, 1])  # the first and the third are right


def make_images(samples=4, channels=1):
    return torch.rand(samples, channels, 5, 6, generator=torch.Generator().manual_seed(1))


def step(engine, batch):
    """Predict what the test wants."""
    return nn.functional.one_hot(PREDICTED, 3).float()[: len(batch[0])], batch[1]


def draw(data=None, engine=None, **arguments):
    engine = engine or Engine(lambda engine, batch: None)
    data = (make_images(), TRUE) if data is None else data
    handler = SamplePredictions(data, **{"step": step, **arguments}).attach(engine)
    engine.run([0, 0], max_epochs=1)
    return handler.figure


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


# ---------------------------------------------------------------------- what is seen


def test_each_image_has_its_label_and_where_it_is_wrong_the_true_one():
    figure = draw()
    assert titles(figure) == ["✓ 0", "✗ 2\ntrue: 1", "✓ 2", "✗ 1\ntrue: 0"]
    assert figure.get_suptitle() == "epoch 1, iteration 2: 2 of 4 right"
    assert "✓ right" in figure.get_supxlabel() and "✗ wrong" in figure.get_supxlabel()


def test_the_frames_of_wrong_ones_differ_in_width_too():
    widths = [axes.spines["top"].get_linewidth() for axes in draw().axes]
    assert widths[1] == widths[3] > 2 * widths[0] == 2 * widths[2]


def test_classes_are_named():
    assert titles(draw(classes=["cat", "dog", "an animal of another kind"]))[1:3] == [
        "✗ an animal of a…\ntrue: dog",
        "✓ an animal of a…",
    ]
    with pytest.raises(DataError, match="classes= names 2 classes, and there is a class 2"):
        draw(classes=["cat", "dog"])


def test_without_true_labels_nothing_is_called_right_or_wrong():
    figure = draw(make_images(), step=lambda engine, batch: PREDICTED)
    assert titles(figure) == ["0", "2", "2", "1"]
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("epoch 1, iteration 2", "")


def test_a_mapping_is_taken_as_an_output_and_as_a_batch():
    def mapped(engine, batch):
        return {"loss": 0.5, "y_pred": PREDICTED, "y": batch["label"]}

    assert titles(draw({"image": make_images(), "label": TRUE}, step=mapped))[:2] == ["✓ 0", "✗ 2\ntrue: 1"]


@pytest.mark.parametrize(("samples", "shown"), [(1, 1), (3, 3), (99, 4)])
def test_no_more_samples_are_shown_than_wanted(samples, shown):
    assert len(titles(draw(samples=samples))) == shown


def test_columns_are_as_wanted():
    columns = {axes.get_subplotspec().get_gridspec().ncols for axes in draw(columns=3).axes}
    assert columns == {3}


@pytest.mark.parametrize("letters", [1, 15])
@pytest.mark.parametrize("samples", [1, 5, 16])
def test_no_text_overlaps_another(samples, letters):
    images, labels = make_images(samples), torch.zeros(samples, dtype=torch.int64)
    figure = draw((images, labels), step=lambda engine, batch: (1 - batch[1], batch[1]), classes=["m" * letters, "w"])
    FigureCanvasAgg(figure).draw()
    texts = [axes.title for axes in figure.axes] + [text for text in figure.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) == samples + 2
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


# ---------------------------------------------------------------------- images


def pixels(images):
    (axes,) = draw((images, TRUE[:1])).axes
    return torch.as_tensor(axes.get_images()[0].get_array())


def test_images_from_0_to_1_are_shown_as_they_are():
    image = make_images(1) / 2
    assert torch.equal(pixels(image), image[0, 0].double())
    assert torch.equal(pixels(image[:, 0]), image[0, 0].double())


def test_bytes_are_shown_as_they_are():
    assert pixels(torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)).unique().tolist() == pytest.approx([0.2])


def test_other_images_are_stretched_over_their_own_range():
    image = make_images(1, channels=3) * 7 - 3
    shown = pixels(image)
    assert shown.shape == (5, 6, 3)
    assert (shown.min(), shown.max()) == (0, 1)
    assert torch.equal(shown.flatten().argsort(), image[0].permute(1, 2, 0).flatten().argsort())


def test_what_is_not_finite_or_all_the_same_can_be_shown():
    image = make_images(1)
    image[0, 0, 0, 0] = torch.nan
    assert pixels(image)[0, 0] == 0
    assert pixels(torch.full((1, 1, 2, 2), -4.0)).unique().tolist() == [0.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_images_of_any_dtype_can_be_shown(dtype):
    assert pixels(torch.ones(1, 1, 2, 2).to(dtype)).unique().tolist() == [1]


def test_a_function_makes_the_images_where_the_batch_has_none():
    flat = torch.rand(4, 30)
    figure = draw((flat, TRUE), images=lambda batch: batch[0].view(-1, 5, 6))
    assert figure.axes[0].get_images()[0].get_array().shape == (5, 6)
    with pytest.raises(DataError, match=r"images of shape \(4, 30\).*images="):
        draw((flat, TRUE))
    with pytest.raises(DataError, match=r"images of shape \(4, 5, 6, 3\).*permute"):
        draw((torch.rand(4, 5, 6, 3), TRUE))


# ---------------------------------------------------------------------- outputs


@pytest.mark.parametrize("output", [lambda batch: torch.rand(4), lambda batch: (torch.rand(4, 1), batch[1])])
def test_scores_of_one_class_are_refused_with_the_remedy(output):
    with pytest.raises(DataError, match=r"predictions of shape .*\(N, C\).*step="):
        draw(step=lambda engine, batch: output(batch))


@pytest.mark.parametrize("output", [None, {"loss": 1}, (), torch.tensor(1), "text"])
def test_an_output_without_predictions_is_refused(output):
    with pytest.raises(DataError, match="were wanted"):
        draw(step=lambda engine, batch: output)


def test_as_many_images_as_predictions_are_wanted():
    with pytest.raises(DataError, match="4 images and 3 predictions"):
        draw(step=lambda engine, batch: PREDICTED[:3])


# ---------------------------------------------------------------------- when, and what of it is kept


def test_a_picture_of_each_epoch_is_saved_and_the_newest_kept(tmp_path):
    engine, drawn = Engine(lambda engine, batch: None), []
    data = (make_images(), TRUE)
    handler = SamplePredictions(
        data,
        step=step,
        path=tmp_path / "new" / "epoch-{epoch:02d}.png",
        callback=lambda engine, figure: drawn.append((engine.state.epoch, figure)),
    ).attach(engine)
    assert handler.figure is None
    engine.run([0], max_epochs=3)
    assert [path.name for path in sorted((tmp_path / "new").iterdir())] == [
        f"epoch-0{epoch}.png" for epoch in (1, 2, 3)
    ]
    assert [epoch for epoch, _ in drawn] == [1, 2, 3]
    assert handler.figure is drawn[-1][1]
    assert pyplot.get_fignums() == []
    assert handler.figure._repr_png_() == (tmp_path / "new" / "epoch-03.png").read_bytes()


def test_it_draws_at_the_event_that_was_asked_for():
    seen = []
    engine = Engine(lambda engine, batch: None)
    draw(
        engine=engine,
        every=Events.ITERATION_COMPLETED(every=2),
        callback=lambda engine, figure: seen.append(figure.get_suptitle()),
    )
    assert seen == ["epoch 1, iteration 2: 2 of 4 right"]


def test_the_first_batch_of_a_loader_is_taken_each_time():
    seen = []

    def look(engine, batch):
        seen.append(batch[1].tolist())
        return step(engine, batch)

    loader = DataLoader(TensorDataset(make_images(8), torch.arange(8) % 3), batch_size=4)
    engine = Engine(lambda engine, batch: None)
    SamplePredictions(loader, step=look).attach(engine)
    SamplePredictions(lambda state: loader, step=look).attach(engine)
    engine.run([0], max_epochs=2)
    assert seen == [[0, 1, 2, 0]] * 4


def test_the_model_is_asked_in_evaluation_mode_and_without_gradients():
    net = nn.Sequential(nn.Flatten(), nn.Linear(30, 3), nn.Dropout(0.5))
    trainer = create_supervised_trainer(net, torch.optim.SGD(net.parameters(), lr=0.0), cross_entropy)
    handler = SamplePredictions((make_images(), TRUE)).attach(trainer)
    trainer.run([(make_images(), TRUE)])
    expected = net.eval()(make_images()).argmax(1)
    found = [title.split("\n")[0][2:] for title in titles(handler.figure)]
    assert found == [str(number) for number in expected.tolist()]


@pytest.mark.parametrize("error", [ValueError("of the user"), KeyboardInterrupt()])
def test_an_error_in_the_prediction_goes_through_and_the_last_picture_stays(error):
    def fail_later(engine, batch):
        if engine.state.parent.epoch == 2:
            raise error
        return step(engine, batch)

    engine = Engine(lambda engine, batch: None)
    handler = SamplePredictions((make_images(), TRUE), step=fail_later).attach(engine)
    with pytest.raises(type(error)):
        engine.run([0], max_epochs=3)
    assert handler.figure.get_suptitle().startswith("epoch 1")


@pytest.mark.parametrize("every", [Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED, Events.EPOCH_STARTED])
@pytest.mark.parametrize("data", ["shuffled", "own generator", "noisy data set"])
def test_the_training_is_bit_identical_with_and_without_it(data, every):
    watched = Training(data)
    SamplePredictions(
        watched.loader,
        step=lambda engine, batch: (engine.model(batch[0]), batch[1]),
        images=lambda batch: batch[0].view(-1, 2, 3),
        every=every,
    ).attach(watched.engine)
    assert_equal_to_the_bit(watched.run(2).outcome(), Training(data).run(2).outcome())


def test_it_keeps_the_contract_of_handlers():
    def predict(engine, batch):
        return (engine.model(batch[0]).sum(1) > 0).long()

    flat = torch.rand(2, 4)
    check_handler(lambda engine: SamplePredictions((flat, TRUE[:2]), step=predict, images=lambda b: b[0].view(2, 2, 2)))


def train_on_ranks(strategy, watch, path):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(30, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    trainer = create_supervised_trainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), cross_entropy, strategy=strategy
    )
    data = TensorDataset(make_images(12), torch.arange(12) % 3)
    pictures = SamplePredictions(next(iter(DataLoader(data, 4))), path=path)
    if watch:
        pictures.attach(trainer)
    trainer.run(DataLoader(data, batch_size=3, shuffle=True), max_epochs=2)
    weights = {name: value.clone() for name, value in trainer.strategy.full_state_dict(net).items()}
    return weights, pictures.figure is not None


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_ranks_only_the_first_draws_and_the_weights_are_the_same_to_the_bit(strategy, tmp_path):
    path = str(tmp_path / "{epoch}.png")
    watched, alone = (run_on_ranks(train_on_ranks, 2, strategy, watch, path) for watch in (True, False))
    assert_equal_to_the_bit([weights for weights, _ in watched], [weights for weights, _ in alone])
    assert [has_figure for _, has_figure in watched] == [True, False]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["1.png", "2.png"]


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"data": iter([])}, DataError, "data=<list_iterator.*again and again"),
        ({"data": 3}, DataError, "data=3"),
        ({"step": "step"}, TypeError, "step='step'"),
        ({"images": 1}, TypeError, "images=1"),
        ({"callback": 1}, TypeError, "callback=1"),
        ({"classes": "cat"}, TypeError, "classes='cat'"),
        ({"samples": 0}, ValueError, "samples=0"),
        ({"columns": 0}, ValueError, "columns=0"),
        ({"path": 3}, TypeError, "path=3"),
        ({"path": "{number}.png"}, ValueError, "{epoch}, {iteration}, {updates}"),
        ({"path": "{epoch.png"}, ValueError, "{epoch}, {iteration}, {updates}"),
        ({"path": "picture.txt"}, ValueError, r"one of the endings .*png"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        SamplePredictions(**{"data": (make_images(), TRUE), **arguments})


def test_without_matplotlib_the_command_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"SamplePredictions needs matplotlib.*pip install 'pellucid\[notebook\]'"):
        SamplePredictions(make_images())
