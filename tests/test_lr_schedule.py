from __future__ import annotations

import io
import math

import pytest
import torch
from ignite.handlers import param_scheduler as ignite_schedulers
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as torch_schedulers

from pellucid.engine import CheckpointError, Engine, Events, HandlerError, MonitorError, SingleDevice
from pellucid.handlers import History, LRSchedule


def step(engine, batch):
    engine.backward(engine.model(torch.ones(1, 1)).sum() * batch)
    return engine.update()


def make_engine(*, groups=1, optimizer=SGD, rate=1.0, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(groups)))
    parts = [{"params": part.parameters(), "lr": rate / 10**i} for i, part in enumerate(model)]
    return Engine(step, model, optimizer=optimizer(parts, lr=rate), **arguments)


def rates_used(engine):
    """The rates of each update that is made, of a single group as a number."""
    used, trying = [], []

    @engine.on(Events.UPDATE_STARTED)
    def note(engine, batch):
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        trying.append(rates if len(rates) > 1 else rates[0])

    engine.add_event_handler(Events.UPDATE_COMPLETED, lambda engine, batch: used.append(trying[-1]))
    return used


def values_of(make, count, **arguments):
    """The first values of a schedule, stepped by hand after each update."""
    optimizer = make_engine(**arguments).optimizer
    scheduler = make(optimizer)
    values = []
    for _ in range(count):
        rates = [group["lr"] for group in optimizer.param_groups]
        values.append(rates if len(rates) > 1 else rates[0])
        optimizer.step()
        scheduler.step()
    return values


def in_sequence(optimizer):
    first = torch_schedulers.ConstantLR(optimizer, factor=0.1, total_iters=2)
    return torch_schedulers.SequentialLR(optimizer, [first, torch_schedulers.ExponentialLR(optimizer, 0.9)], [2])


def chained(optimizer):
    first = torch_schedulers.ConstantLR(optimizer, factor=0.1, total_iters=2)
    return torch_schedulers.ChainedScheduler([first, torch_schedulers.ExponentialLR(optimizer, 0.9)], optimizer)


TORCH = {
    "LambdaLR": lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "StepLR": lambda optimizer: torch_schedulers.StepLR(optimizer, 1, 0.5),
    "MultiStepLR": lambda optimizer: torch_schedulers.MultiStepLR(optimizer, [1, 3], 0.1),
    "ExponentialLR": lambda optimizer: torch_schedulers.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: torch_schedulers.CosineAnnealingLR(optimizer, 6),
    "CosineAnnealingWarmRestarts": lambda optimizer: torch_schedulers.CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: torch_schedulers.OneCycleLR(optimizer, 0.5, total_steps=12, cycle_momentum=False),
    "CyclicLR": lambda optimizer: torch_schedulers.CyclicLR(optimizer, 0.1, 1.0, 3, cycle_momentum=False),
    "SequentialLR": in_sequence,
    "ChainedScheduler": chained,
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", TORCH)
def test_each_update_uses_the_next_value_of_the_schedule_with_a_partial_last_window_too(name, accumulate):
    engine = make_engine(gradient_accumulation_steps=accumulate)
    used = rates_used(engine)
    LRSchedule(TORCH[name](engine.optimizer)).attach(engine)
    engine.run([1.0] * 5, max_epochs=2)  # with windows of 3: 3 and 2, 3 and 2
    updates = engine.state.updates
    assert (updates, used) == ({1: 10, 3: 4}[accumulate], values_of(TORCH[name], updates))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_skipped_for_inf_moves_nothing(accumulate):
    strategy = SingleDevice("cpu", precision="fp16", scaler={"init_scale": 4.0})
    engine = make_engine(gradient_accumulation_steps=accumulate, strategy=strategy)
    used = rates_used(engine)
    schedule = LRSchedule(TORCH["StepLR"](engine.optimizer)).attach(engine)
    weights = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine, batch: weights.append(next(engine.model.parameters()).item())
    )
    batches = [1.0] * 3 * accumulate + [1.0]
    batches[accumulate] = math.inf  # in the second of four windows
    engine.run(batches)
    assert (used, schedule.rates) == ([1.0, 0.5, 0.25], (0.125,))
    assert (engine.state.iteration, engine.state.updates) == (3 * accumulate + 1, 3)
    assert weights[accumulate - 1] == weights[2 * accumulate - 1] != weights[-1]


def test_a_first_update_that_is_skipped_moves_nothing_and_makes_no_warning():
    strategy = SingleDevice("cpu", precision="fp16", scaler={"init_scale": 4.0})
    for every in ("update", "epoch"):
        engine = make_engine(strategy=strategy)
        used = rates_used(engine)
        LRSchedule(TORCH["StepLR"](engine.optimizer), every=every).attach(engine)
        engine.run(lambda state: [math.inf] if state.epoch == 1 else [1.0], max_epochs=3)
        assert used == [1.0, 0.5]


def test_a_schedule_by_epoch_moves_at_the_end_of_each_epoch():
    engine = make_engine()
    used = rates_used(engine)
    schedule = LRSchedule(TORCH["StepLR"](engine.optimizer), every="epoch").attach(engine)
    engine.run([1.0] * 2, max_epochs=3)
    assert (used, schedule.rates) == ([1.0, 1.0, 0.5, 0.5, 0.25, 0.25], (0.125,))


def test_a_plain_optimizer_step_moves_it_too():
    def plain_step(engine, batch):
        engine.model(torch.ones(1, 1)).sum().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    model = nn.Linear(1, 1)
    engine = Engine(plain_step, model, optimizer=SGD(model.parameters(), lr=1.0))
    used = rates_used(engine)
    LRSchedule(TORCH["StepLR"]).attach(engine)
    engine.run(range(3))
    assert used == [1.0, 0.5, 0.25]


def test_every_parameter_group_is_moved():
    engine = make_engine(groups=3)
    used = rates_used(engine)
    LRSchedule(TORCH["CosineAnnealingLR"]).attach(engine)
    engine.run([1.0] * 5)
    assert used == values_of(TORCH["CosineAnnealingLR"], 5, groups=3)


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(1.0)
    model = nn.Linear(1, 1)
    engine = Engine(step, model, optimizer=AdamW(model.parameters(), lr=rate, foreach=False))
    LRSchedule(TORCH["StepLR"], warmup=2, warmup_start=0.5).attach(engine)
    used = rates_used(engine)
    engine.add_event_handler(Events.UPDATE_STARTED, lambda engine, batch: used.append(rate.item()))
    engine.run([1.0] * 4)
    assert engine.optimizer.param_groups[0]["lr"] is rate
    assert [value for value in used if isinstance(value, float)] == [0.5, 0.75, 1.0, 0.5]


# ---- Ignite's schedulers


IGNITE = {
    "linear": lambda o: ignite_schedulers.LinearCyclicalScheduler(o, "lr", 1.0, 0.0, 8),
    "cosine": lambda o: ignite_schedulers.CosineAnnealingScheduler(o, "lr", 1.0, 0.1, 4),
    "piecewise": lambda o: ignite_schedulers.PiecewiseLinear(o, "lr", [(1, 0.5), (4, 0.2)]),
    "torch's": lambda o: ignite_schedulers.LRScheduler(torch_schedulers.StepLR(o, 2, 0.5)),
    "warm-up": lambda o: ignite_schedulers.create_lr_scheduler_with_warmup(
        torch_schedulers.ExponentialLR(o, 0.5), warmup_start_value=0.1, warmup_end_value=1.0, warmup_duration=3
    ),
    "warm-up of its own": lambda o: ignite_schedulers.create_lr_scheduler_with_warmup(
        ignite_schedulers.CosineAnnealingScheduler(o, "lr", 1.0, 0.1, 4), warmup_start_value=0.1, warmup_duration=3
    ),
}


def ignite_values(make, count):
    optimizer = make_engine().optimizer
    scheduler, values = make(optimizer), []
    for _ in range(count):
        scheduler(None)  # as Ignite does at ITERATION_STARTED
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    return values


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", IGNITE)
def test_ignites_schedulers_give_each_update_their_next_value(name, accumulate):
    engine = make_engine(gradient_accumulation_steps=accumulate)
    used = rates_used(engine)
    LRSchedule(IGNITE[name](engine.optimizer)).attach(engine)
    engine.run([1.0] * 5, max_epochs=3)
    updates = engine.state.updates
    assert (updates, used) == ({1: 15, 3: 6}[accumulate], ignite_values(IGNITE[name], updates))


def test_ignites_history_of_values_is_kept_where_ignite_keeps_it():
    engine = make_engine()
    scheduler = ignite_schedulers.LinearCyclicalScheduler(engine.optimizer, "lr", 1.0, 0.0, 8, save_history=True)
    LRSchedule(scheduler).attach(engine)
    engine.run([1.0] * 3)
    assert engine.ignite.state.param_history == {"lr": [[1.0], [0.75], [0.5], [0.25]]}


# ---- warm-up


def test_the_warm_up_is_that_of_torch_and_the_schedule_begins_after_it():
    def sequence(optimizer):
        warm = torch_schedulers.LinearLR(optimizer, start_factor=0.2, total_iters=4)
        return torch_schedulers.SequentialLR(optimizer, [warm, TORCH["ExponentialLR"](optimizer)], [4])

    engine = make_engine(groups=2)
    used = rates_used(engine)
    LRSchedule(TORCH["ExponentialLR"], warmup=4, warmup_start=0.2).attach(engine)
    engine.run([1.0] * 9)
    assert used == [pytest.approx(rates) for rates in values_of(sequence, 9, groups=2)]
    assert used[4] == [1.0, 0.1]  # exactly


def test_a_warm_up_counts_updates_also_before_a_schedule_by_epoch():
    engine = make_engine()
    used = rates_used(engine)
    LRSchedule(TORCH["StepLR"], every="epoch", warmup=2, warmup_start=0.5).attach(engine)
    engine.run([1.0, 1.0, 1.0], max_epochs=2)
    assert used == [0.5, 0.75, 1.0, 0.5, 0.5, 0.5]


def test_a_warm_up_goes_before_a_scheduler_of_ignite_too():
    engine = make_engine()
    used = rates_used(engine)
    LRSchedule(IGNITE["linear"], warmup=2, warmup_start=0.5).attach(engine)
    engine.run([1.0] * 5)
    assert used == [0.5, 0.75, 1.0, 0.75, 0.5]


# ---- plateau


def plateau(scores, *, mode="min", patience=0, warmup=0):
    """The rate of each epoch, where each epoch's score is recorded at its end."""
    engine = make_engine()
    used = rates_used(engine)
    scheduler = torch_schedulers.ReduceLROnPlateau(engine.optimizer, mode=mode, patience=patience, factor=0.5)
    schedule = LRSchedule(scheduler, monitor="val/loss", warmup=warmup).attach(engine)
    engine.add_event_handler(
        Events.EPOCH_COMPLETED, lambda engine, batch: engine.record({"val/loss": scores[engine.state.epoch - 1]})
    )
    engine.run([1.0], max_epochs=len(scores))
    return [*used, *schedule.rates]


def test_a_plateau_schedule_moves_when_its_score_is_recorded():
    assert plateau([3.0, 2.0, 2.0, 1.0, 1.0]) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]
    assert plateau([1.0, 2.0, 2.0, 2.0], mode="max", patience=1) == [1.0, 1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_score_that_is_not_finite_is_never_an_improvement(value, mode):
    better = {"min": [2.0, 1.0], "max": [1.0, 2.0]}[mode]
    assert plateau([better[0], value, better[1]], mode=mode) == [1.0, 1.0, 0.5, 0.5]
    assert plateau([value, better[0], better[0]], mode=mode) == [1.0, 0.5, 0.5, 0.25]


def test_a_plateau_schedule_looks_at_no_score_before_the_warm_up_has_ended():
    assert plateau([0.1, 5.0, 4.0, 3.0, 3.0], warmup=2) == [0.01, 0.505, 1.0, 1.0, 1.0, 0.5]


def test_a_monitor_that_nobody_records_is_an_error():
    engine = make_engine()
    scheduler = torch_schedulers.ReduceLROnPlateau(engine.optimizer)
    LRSchedule(scheduler, monitor="val/los").attach(engine)
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda engine, batch: engine.record({"val/loss": 1.0}))
    with pytest.raises(MonitorError, match="did you mean 'val/loss'"):
        engine.run([1.0], max_epochs=2)


# ---- several optimizers


def gan_step(engine, batch):
    for name in batch:
        engine.backward(engine.model[name](torch.ones(1, 1)).sum(), optimizer=name)
        engine.update(name)


def make_gan():
    models = {"generator": nn.Linear(1, 1), "critic": nn.Linear(1, 1)}
    return Engine(gan_step, models, optimizer={name: SGD(m.parameters(), lr=1.0) for name, m in models.items()})


def test_a_schedule_follows_the_updates_of_its_own_optimizer():
    engine = make_gan()
    generator = LRSchedule(TORCH["StepLR"], optimizer="generator").attach(engine)
    critic = LRSchedule(TORCH["StepLR"](engine.optimizer["critic"])).attach(engine)
    engine.run([["critic"], ["critic", "generator"], ["critic"]])
    assert (generator.rates, critic.rates) == ((0.5,), (0.125,))


def test_a_schedule_must_belong_to_an_optimizer_of_the_engine():
    stranger = make_engine().optimizer
    with pytest.raises(HandlerError, match=r"not of any of the engine's optimizers.*factory"):
        LRSchedule(TORCH["StepLR"](stranger)).attach(make_engine())
    engine = make_gan()
    with pytest.raises(HandlerError, match="not of the optimizer 'critic'"):
        LRSchedule(TORCH["StepLR"](engine.optimizer["generator"]), optimizer="critic").attach(engine)
    with pytest.raises(HandlerError, match=r"\['generator', 'critic'\]: say which one"):
        LRSchedule(TORCH["StepLR"]).attach(engine)
    with pytest.raises(HandlerError, match="optimizer='critik'"):
        LRSchedule(TORCH["StepLR"], optimizer="critik").attach(engine)


# ---- recording


def test_the_rates_in_use_are_recorded_if_asked_for():
    def recorded(engine, schedule, data):
        history = History().attach(engine)
        schedule.attach(engine)
        engine.run(data)
        return [(row.updates, row.name, pytest.approx(row.value)) for row in history]

    assert recorded(make_engine(), LRSchedule(TORCH["StepLR"]), [1.0] * 3) == []
    assert recorded(make_engine(), LRSchedule(TORCH["StepLR"], record="lr"), [1.0] * 3) == [
        (1, "lr", 1.0),
        (2, "lr", 0.5),
        (3, "lr", 0.25),
    ]
    schedule = LRSchedule(TORCH["StepLR"], record="lr", every="epoch", warmup=1)
    assert recorded(make_engine(groups=2), schedule, [1.0] * 3) == [
        (1, "group0/lr", 0.01),
        (1, "group1/lr", 0.001),
        (3, "group0/lr", 1.0),
        (3, "group1/lr", 0.1),
    ]
    assert recorded(make_gan(), LRSchedule(TORCH["StepLR"], record="lr", optimizer="critic"), [["critic"]]) == [
        (1, "critic/lr", 1.0)
    ]


def test_a_plateau_schedule_records_its_rate_next_to_the_score():
    engine = make_engine()
    history = History().attach(engine)
    scheduler = torch_schedulers.ReduceLROnPlateau(engine.optimizer, patience=0, factor=0.5)
    LRSchedule(scheduler, monitor="loss", record="lr").attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: engine.record({"loss": 1.0}))
    engine.run([1.0] * 3)
    assert [row.value for row in history if row.name == "lr"] == [1.0, 1.0, 0.5]


# ---- going on


EVERYTHING = {
    **{name: (make, {}) for name, make in TORCH.items()},
    **{f"Ignite's {name}": (make, {}) for name, make in IGNITE.items()},
    "warm-up": (TORCH["ExponentialLR"], {"warmup": 4}),
    "by epoch": (TORCH["ExponentialLR"], {"every": "epoch"}),
    "plateau": (
        lambda optimizer: torch_schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        {"monitor": "loss", "warmup": 2},
    ),
}


def scheduled(make, arguments):
    engine = make_engine()
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, batch: engine.record({"loss": 1.0}))
    return engine, LRSchedule(make, **arguments).attach(engine)


@pytest.mark.parametrize("cut", [0, 1, 3, 5, 10])
@pytest.mark.parametrize("kind", EVERYTHING)
def test_a_run_that_is_cut_and_resumed_in_new_objects_uses_the_rates_of_one_go(kind, cut):
    engine, _ = scheduled(*EVERYTHING[kind])
    in_one_go = rates_used(engine)
    engine.run([1.0] * 5, max_iters=10)

    first, before = scheduled(*EVERYTHING[kind])
    used = rates_used(first)
    if cut:
        first.run([1.0] * 5, max_iters=cut)
    file = io.BytesIO()
    torch.save([first.state_dict(), before.state_dict(), first.optimizer.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)

    second, after = scheduled(*EVERYTHING[kind])
    used_after = rates_used(second)
    second.optimizer.load_state_dict(states[2])
    second.load_state_dict(states[0])
    after.load_state_dict(states[1])
    assert after.rates == before.rates
    second.run([1.0] * 5, max_iters=10)
    assert used + used_after == in_one_go


def test_a_schedule_attached_after_the_optimizer_was_loaded_sets_the_rate_it_had():
    first = make_engine()
    before = LRSchedule(TORCH["ExponentialLR"]).attach(first)
    first.run([1.0] * 3)
    second = make_engine()
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    after = LRSchedule(TORCH["ExponentialLR"]).attach(second)
    after.load_state_dict(before.state_dict())
    assert after.rates == before.rates == (pytest.approx(0.9**3),)


def test_a_saved_state_does_not_change_with_the_run_and_loading_leaves_it_whole():
    engine = make_engine()
    schedule = LRSchedule(TORCH["CyclicLR"]).attach(engine)
    state = schedule.state_dict()
    text = repr(state)
    engine.run([1.0] * 3)
    schedule.load_state_dict(state)
    assert repr(state) == text


def test_a_state_that_does_not_fit_is_refused():
    engine = make_engine()
    schedule = LRSchedule(TORCH["StepLR"])
    with pytest.raises(HandlerError, match="when it is attached"):
        schedule.load_state_dict({})
    schedule.attach(engine)
    with pytest.raises(CheckpointError, match="the keys"):
        schedule.load_state_dict({"scheduler": {}})
    of_two = LRSchedule(TORCH["StepLR"]).attach(make_engine(groups=2)).state_dict()
    with pytest.raises(CheckpointError, match="1 parameter groups, and the state is of one with 2"):
        schedule.load_state_dict(of_two)


# ---- arguments and attaching


def two_optimizers():
    parts = [ignite_schedulers.LinearCyclicalScheduler(make_engine().optimizer, "lr", 1, 0, 8) for _ in range(2)]
    return ignite_schedulers.ParamGroupScheduler(parts)


OPTIMIZER = SGD([nn.Parameter(torch.ones(1))], lr=1.0)


@pytest.mark.parametrize(
    ("scheduler", "arguments", "error", "message"),
    [
        (None, {}, HandlerError, "a factory was wanted, got None"),
        (TORCH["StepLR"], {"every": "iteration"}, ValueError, "every='iteration'"),
        (TORCH["StepLR"], {"every": "epoch", "monitor": "loss"}, ValueError, "every='epoch'"),
        (TORCH["StepLR"], {"warmup": -1}, ValueError, "warmup=-1"),
        (TORCH["StepLR"], {"warmup": 0.5}, TypeError, "warmup=0.5"),
        (TORCH["StepLR"], {"warmup_start": math.nan}, ValueError, "warmup_start=nan"),
        (TORCH["StepLR"](OPTIMIZER), {"monitor": "loss"}, HandlerError, "looks at no score"),
        (torch_schedulers.ReduceLROnPlateau(OPTIMIZER), {}, HandlerError, "give monitor="),
        (torch_schedulers.ReduceLROnPlateau(OPTIMIZER), {"monitor": ""}, TypeError, "monitor=''"),
        (ignite_schedulers.ReduceLROnPlateauScheduler(OPTIMIZER, "loss"), {}, HandlerError, "give torch's"),
        (
            ignite_schedulers.LRScheduler(torch_schedulers.CosineAnnealingWarmRestarts(OPTIMIZER, 3)),
            {},
            HandlerError,
            "could not be saved",
        ),
        (two_optimizers(), {}, HandlerError, "several optimizers"),
    ],
)
def test_what_cannot_be_moved_is_refused_at_once(scheduler, arguments, error, message):
    with pytest.raises(error, match=message):
        LRSchedule(scheduler, **arguments)


def test_a_factory_is_called_when_it_is_attached_and_must_return_a_scheduler():
    schedule = LRSchedule(TORCH["StepLR"])
    with pytest.raises(HandlerError, match="no scheduler yet"):
        _ = schedule.scheduler
    engine = make_engine()
    assert schedule.attach(engine).scheduler.optimizer is engine.optimizer
    with pytest.raises(HandlerError, match="must return a scheduler"):
        LRSchedule(lambda optimizer: None).attach(engine)
    with pytest.raises(HandlerError, match="give monitor="):
        LRSchedule(torch_schedulers.ReduceLROnPlateau).attach(engine)


def test_it_is_attached_once_and_comes_off_again():
    engine = make_engine()
    schedule = LRSchedule(IGNITE["linear"]).attach(engine)
    with pytest.raises(HandlerError, match="already"):
        schedule.attach(engine)
    engine.run([1.0])
    schedule.detach(engine)
    engine.run([1.0], max_epochs=2)
    schedule.attach(engine)  # goes on where it was
    assert schedule.rates == (0.75,)
    with pytest.raises(HandlerError, match="makes no updates"):
        LRSchedule(TORCH["StepLR"]).attach(Engine(step, nn.Linear(1, 1), mode="eval"))
