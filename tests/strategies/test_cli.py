"""Strategy, method and every part from YAML and the command line, in both packages' LightningCLI."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import nn

from lightning_sparsecomm import (
    Channel,
    CompressionMonitor,
    ErrorFeedback,
    GradientSync,
    Method,
    ParameterAveraging,
    SparsityWarmup,
    methods,
)
from lightning_sparsecomm.basis import DensityWarmup, Stages, Warmup, Wire
from lightning_sparsecomm.codecs import Float16, SparseCodec, TopK
from lightning_sparsecomm.exchange import DenseAllReduce, Gather
from lightning_sparsecomm.methods import default, dense, dgc, gradient_dropping
from lightning_sparsecomm.sharing import Averaging

# LightningCLI 2.6 calls what jsonargparse 4.53 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")

PACKAGES = ["pytorch_lightning", "lightning.pytorch"]
Cli = Callable[..., Any]


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The package whose CLI runs: the other one's has not been imported."""
    for other in PACKAGES:
        if other != request.param:
            monkeypatch.delitem(sys.modules, f"{other}.cli", raising=False)
    return request.param


in_one_package = pytest.mark.parametrize("package", PACKAGES[:1], indirect=True)


@pytest.fixture
def cli(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """LightningCLI with some arguments: a dictionary is a YAML file."""
    monkeypatch.chdir(tmp_path)
    demos = importlib.import_module(f"{package}.demos.boring_classes")
    make = importlib.import_module(f"{package}.cli").LightningCLI
    defaults = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    defaults |= {"enable_progress_bar": False, "enable_model_summary": False}

    def run(*arguments: Any, **options: Any) -> Any:
        args = ["train.py"]
        for index, argument in enumerate(arguments):
            if isinstance(argument, dict):
                file = tmp_path / f"{index}.yaml"
                file.write_text(yaml.dump(argument))
                argument = f"--config={file}"
            args.append(argument)
        options = {"run": False, "save_config_callback": None, "seed_everything_default": 0, **options}
        with mock.patch("sys.argv", args):
            return make(demos.DemoModel, demos.BoringDataModule, trainer_defaults=defaults, **options)

    return run


def part(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_sparsecomm.{name}", **({"init_args": init_args} if init_args else {})}


def with_strategy(**init_args: Any) -> dict[str, Any]:
    return {"trainer": {"strategy": part("SparseCommStrategy", **init_args)}}


STRATEGY = "--trainer.strategy=lightning_sparsecomm.SparseCommStrategy"
METHOD = "--trainer.strategy.method"


def test_defaults_are_those_of_python(cli: Cli, package: str) -> None:
    of_package = importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy
    python = of_package()
    for config, method in (
        (with_strategy(), default()),
        (with_strategy(seed=0, check_replicas_every=1000, uneven_inputs=False), default()),
        (with_strategy(method=part("methods.gradient_dropping")), gradient_dropping()),
        (with_strategy(method=part("methods.dgc")), dgc()),
        ({"trainer": {"strategy": "sparsecomm"}}, default()),
        ({"trainer": {"strategy": "sparsecomm_gradient_dropping"}}, gradient_dropping()),
        ({"trainer": {"strategy": "sparsecomm_dgc"}}, dgc()),
    ):
        strategy = cli(config).trainer.strategy
        assert type(strategy) is of_package
        assert repr(strategy.method) == repr(method)
        assert repr(python.method) == repr(default())
        assert strategy.seed == python.seed
        assert strategy.check_replicas_every == python.check_replicas_every == 1000
        assert strategy._start_method == python._start_method
        assert strategy._timeout == python._timeout
    strategy = cli(with_strategy(method=part("methods.dense"), check_replicas_every=None)).trainer.strategy
    assert repr(strategy.method) == repr(dense())
    assert strategy.check_replicas_every is None


def test_of_two_clis_that_are_imported_the_one_that_runs_is_meant(cli: Cli, package: str) -> None:
    for each in PACKAGES:
        importlib.import_module(f"{each}.cli")
    strategy = cli(with_strategy(seed=4)).trainer.strategy
    assert type(strategy) is importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy
    assert strategy.seed == 4


@in_one_package
@pytest.mark.parametrize(
    ("recipe", "init_args"),
    [
        ("dense", {"wire_dtype": "bfloat16"}),
        ("gradient_dropping", {"density": 0.001}),
        ("gradient_dropping", {"scope": "tensor", "values": "float16", "error_feedback": False}),
        ("gradient_dropping", {"exclude": ["layer.bias"]}),
        ("gradient_dropping", {"local": "partial", "average_every": 50, "average_buffers": True, "warmup_steps": 100}),
        ("dgc", {"density": 0.01, "warmup_epochs": 4, "clip": 0.5, "momentum_masking": False}),
        ("dgc", {"momentum_correction": False, "scope": "model", "exclude": ["layer.bias"]}),
        ("sbc", {"density": 0.001, "every": 3, "momentum_masking": False, "exclude": ["layer.bias"]}),
        ("sbc3", {}),
        ("federated_averaging", {"every": 7, "buffers": "own"}),
        ("diloco", {"every": 50, "outer_lr": 0.5, "outer_momentum": 0.0}),
        ("sparse_loco", {"every": 5, "density": 0.125, "chunk": 64, "decay": 1.0, "outer_lr": 0.8}),
        ("ef21", {"density": 0.05, "clip": 0.5, "scope": "model"}),
        ("ef21", {"scope": "norm"}),
        ("demo", {"k": 16, "side": 32, "decay": 0.99, "sign": False}),
    ],
)
def test_arguments_of_methods(cli: Cli, recipe: str, init_args: dict[str, Any]) -> None:
    strategy = cli(with_strategy(method=part(f"methods.{recipe}", **init_args))).trainer.strategy
    expected = getattr(methods, recipe)(**init_args)
    assert repr(strategy.method) == repr(expected)


@in_one_package
@pytest.mark.parametrize("shape", ["inverse_time", [0.5, 0.1]])
def test_callbacks(cli: Cli, shape: Any) -> None:
    warmup = part("SparsityWarmup", steps=40, shape=shape)
    averaging = part("ParameterAveraging", every=20, buffers=True)
    callbacks = cli({"trainer": {"strategy": "sparsecomm", "callbacks": [warmup, averaging]}}).trainer.callbacks
    (made,) = (callback for callback in callbacks if isinstance(callback, SparsityWarmup))
    assert made.warmup == Warmup(steps=40, shape=shape)
    (made,) = (callback for callback in callbacks if isinstance(callback, ParameterAveraging))
    assert made.averaging == Averaging(20, buffers=True)


@in_one_package
def test_overrides_on_the_command_line(cli: Cli) -> None:
    config = with_strategy(method=part("methods.gradient_dropping", density=0.001, scope="tensor"))
    for option in (f"{METHOD}.density=0.02", "--trainer.strategy.init_args.method.init_args.density=0.02"):
        method = cli(config, option).trainer.strategy.method
        assert repr(method) == repr(gradient_dropping(density=0.02, scope="tensor"))
    # Without a file, too.
    name = "lightning_sparsecomm.methods.gradient_dropping"
    options = ("--trainer.strategy.seed=4", "--trainer.strategy.check_replicas_every=7")
    strategy = cli(STRATEGY, f"{METHOD}={name}", f"{METHOD}.values=float16", *options).trainer.strategy
    assert repr(strategy.method) == repr(gradient_dropping(values="float16"))
    assert strategy.seed == 4
    assert strategy.check_replicas_every == 7
    assert cli(with_strategy(check_replicas_every=500)).trainer.strategy.check_replicas_every == 500
    # Another method than the file's.
    method = cli(config, f"{METHOD}=lightning_sparsecomm.methods.dense").trainer.strategy.method
    assert repr(method) == repr(dense())


@in_one_package
def test_methods_are_found_by_name(cli: Cli) -> None:
    method = cli(STRATEGY, f"{METHOD}=gradient_dropping", f"{METHOD}.density=0.5").trainer.strategy.method
    assert repr(method) == repr(gradient_dropping(density=0.5))


@in_one_package
def test_ddp_options_pass_through(cli: Cli) -> None:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 5}
    strategy = cli(with_strategy(timeout="0:05:00", start_method="fork", **options)).trainer.strategy
    assert {name: strategy._ddp_kwargs[name] for name in options} == options
    assert strategy._timeout.total_seconds() == 300
    assert strategy._start_method == "fork"


@in_one_package
def test_schedule(cli: Cli) -> None:
    schedule = part("basis.DensityWarmup", density=0.05, steps=7)
    expected = repr(gradient_dropping(density=DensityWarmup(0.05, 7)))
    config = with_strategy(method=part("methods.gradient_dropping", density=schedule))
    assert repr(cli(config).trainer.strategy.method) == expected
    config = with_strategy(method=part("methods.gradient_dropping"))
    density = f"{METHOD}.density"
    name = "lightning_sparsecomm.basis.schedules.DensityWarmup"
    trainer = cli(config, f"{density}={name}", f"{density}.density=0.05", f"{density}.steps=7").trainer
    assert repr(trainer.strategy.method) == expected


@in_one_package
def test_an_outer_optimizer_and_a_schedule_of_exchanges(cli: Cli, wire: Wire) -> None:
    outer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}
    every = part("basis.Stages", numbers=[1, 10], steps=[0, 100])
    channel = part("Channel", exchange=part("exchange.DenseAllReduce"))
    method = part("Method", syncs=[part("DeltaSync", channel=channel, every=every, outer=outer)])
    (sync,) = cli(with_strategy(method=method)).trainer.strategy.method.syncs
    assert sync.every == Stages([1, 10], steps=[0, 100])
    made = sync.outer([nn.Parameter(torch.zeros(3))])
    assert isinstance(made, torch.optim.SGD)
    assert [made.defaults[name] for name in ("lr", "momentum", "nesterov")] == [0.7, 0.9, True]
    # What jsonargparse gives refers to its context, which holds locks once Lightning has started processes. So it is
    # never copied; the channel is.
    weight = nn.Parameter(torch.zeros(3))
    share = sync.start(torch.optim.SGD([weight], lr=0.1), [("weight", weight)], wire)
    assert share.sync.outer is sync.outer
    assert share.channel is not sync.channel


SCHEDULE = part("basis.DensityWarmup", density=0.1, steps=1000)
COMPOSED = with_strategy(
    method=part(
        "Method",
        syncs=[
            part(
                "GradientSync",
                channel=part(
                    "Channel",
                    exchange=part(
                        "exchange.Gather",
                        compressor=part(
                            "codecs.SparseCodec",
                            selector=part("codecs.TopK", density=0.05, scope="tensor"),
                            values=part("codecs.Float16"),
                        ),
                    ),
                    memories=[part("ErrorFeedback", decay=0.9)],
                ),
                exclude=["*.bias"],
            ),
            part(
                "GradientSync",
                channel=part("Channel", exchange=part("exchange.DenseAllReduce", wire_dtype="float16")),
                parameters=["*.bias"],
            ),
        ],
    )
)


def composed() -> Method:
    sparse = Gather(SparseCodec(TopK(0.05, scope="tensor"), Float16()))
    return Method(
        [
            GradientSync(Channel(sparse, [ErrorFeedback(decay=0.9)]), exclude=["*.bias"]),
            GradientSync(Channel(DenseAllReduce("float16")), parameters=["*.bias"]),
        ]
    )


@in_one_package
def test_method_of_parts(cli: Cli) -> None:
    """With the time that jsonargparse takes growing by a factor of about 2.5 with each level, this takes seconds."""
    assert repr(cli(COMPOSED).trainer.strategy.method) == repr(composed())


def exit_of(capsys: pytest.CaptureFixture[str], run: Callable[[], Any], code: int) -> str:
    """What is printed: to standard output, or as an error."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "config",
    [
        with_strategy(method=part("methods.gradient_dropping", density=SCHEDULE)),
        with_strategy(method=part("Method", syncs=[part("BucketSync", wire_dtype="float16")])),
    ],
)
def test_printed_config_can_be_fed_back(cli: Cli, config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config["trainer"]["callbacks"] = [part("CompressionMonitor", summary=False)]
    printed = exit_of(capsys, lambda: cli(config, "--print_config"), 0)
    again = yaml.safe_load(printed)
    for section in ("optimizer", "lr_scheduler"):
        again.pop(section, None)
    assert again["trainer"]["strategy"]["init_args"]["method"]["init_args"].keys()
    before, after = cli(config).trainer, cli(again).trainer
    assert repr(after.strategy.method) == repr(before.strategy.method)
    monitor = next(callback for callback in after.callbacks if isinstance(callback, CompressionMonitor))
    assert not monitor.summary
    assert exit_of(capsys, lambda: cli(again, "--print_config"), 0) == printed


def words(text: str) -> str:
    return " ".join(text.split())


def summary_of(part: Any) -> str:
    """The first line of a docstring."""
    summary: str = words(part.__doc__.split("\n\n")[0]).rstrip(".")
    assert summary
    return summary


def described(part: Any, name: str) -> str:
    """What a docstring says of an argument, up to the next one."""
    found = re.search(rf"\n {{4}}{name}: (.*?)(?=\n {{0,4}}\S|\n\n|$)", inspect.getdoc(part) or "", re.DOTALL)
    assert found is not None, f"{part.__name__} does not describe {name}"
    return words(found[1])


def test_help_of_the_strategy(cli: Cli, package: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = words(exit_of(capsys, lambda: cli("--trainer.strategy.help=lightning_sparsecomm.SparseCommStrategy"), 0))
    strategy = importlib.import_module(f"lightning_sparsecomm.strategies.{package}").SparseCommStrategy
    assert summary_of(strategy) in text
    for name in ("method", "seed", "check_replicas_every"):
        assert described(strategy.__init__, name) in text
    assert "--trainer.strategy.find_unused_parameters FIND_UNUSED_PARAMETERS Traverse the autograd graph" in text
    assert "--trainer.strategy.start_method {popen,spawn,fork,forkserver}" in text
    for method in ("dense", "gradient_dropping"):
        assert f"lightning_sparsecomm.methods.{method}" in text


@in_one_package
def test_help_of_a_method(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    text = words(
        exit_of(capsys, lambda: cli(STRATEGY, f"{METHOD}.help=lightning_sparsecomm.methods.gradient_dropping"), 0)
    )
    assert summary_of(gradient_dropping) in text
    assert f"--method.density DENSITY {described(gradient_dropping, 'density')}" in text
    dtypes = "{float32,float16,bfloat16,one_bit,two_bit,three_bit,short_three_bit,few_bits}"
    assert f"--method.values {dtypes} {described(gradient_dropping, 'values')}" in text
    assert described(gradient_dropping, "exclude") in text


@in_one_package
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            [f"{METHOD}=lightning_sparsecomm.Method", f"{METHOD}.syncs.help=lightning_sparsecomm.GradientSync"],
            described(GradientSync, "parameters"),
        ),
        (
            ["--trainer.callbacks.help=lightning_sparsecomm.CompressionMonitor"],
            described(CompressionMonitor, "progress_bar"),
        ),
        (
            [
                f"{METHOD}=lightning_sparsecomm.methods.gradient_dropping",
                f"{METHOD}.density.help=lightning_sparsecomm.basis.schedules.DensityWarmup",
            ],
            described(DensityWarmup, "density"),
        ),
    ],
)
def test_help_of_parts(cli: Cli, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in words(exit_of(capsys, lambda: cli(STRATEGY, *options), 0))


@in_one_package
@pytest.mark.parametrize(
    ("method", "text"),
    [
        (
            part("methods.gradient_dropping", density=100),
            "density must be in (0, 1]: the fraction of elements sent; got",
        ),
        (part("codecs.TopK"), "lightning_sparsecomm.codecs.TopK"),
        (part("methods.gradient_dropping", densty=0.1), "densty"),
        (
            part("methods.gradient_dropping", scope="layer"),
            "typing.Literal['model', 'tensor', 'balanced', 'norm', 'entropy']. Got value: layer",
        ),
        (part("methods.gradient_dropping", exclude="*.bias"), "Got value: *.bias"),
        (part("Method", syncs=[]), "syncs must name at least one sync; got none. Use dense() to send everything."),
        (
            part("Method", syncs=[part("BucketSync"), part("BucketSync")]),
            "a BucketSync must be the only sync of a method",
        ),
    ],
)
def test_values_that_cannot_work(
    cli: Cli, method: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # jsonargparse says what does not parse and exits; what our constructors refuse it passes on.
    try:
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            cli(with_strategy(method=method))
        found = str(refused.value)
    except SystemExit as error:
        # What a recipe or the strategy refuses is all that is said.
        ours = isinstance(error.code, str)
        found = str(error.code) if ours else capsys.readouterr().err
        assert not ours or (found.startswith("error: ") and len(found) < 300)
    assert text in found


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "config", [{"trainer": {"strategy": "sparsecomm_fork"}}, with_strategy(method=part("methods.gradient_dropping"))]
)
@pytest.mark.filterwarnings("ignore:the warm-up does not end before the training")
def test_fit(cli: Cli, config: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """All of DDP's options are passed with their defaults then, which must be as good as none."""
    config = {"trainer": {**config["trainer"], "max_steps": 3, "callbacks": [part("CompressionMonitor")]}}
    config["trainer"] |= {"limit_train_batches": 3, "limit_val_batches": 0, "log_every_n_steps": 1}
    arguments = [] if isinstance(config["trainer"]["strategy"], str) else ["--trainer.strategy.start_method=fork"]
    made = cli(config, *arguments)
    made.datamodule.setup("fit")
    made.trainer.fit(made.model, made.datamodule.train_dataloader())
    printed = capfd.readouterr().out
    assert printed.count("sent by one rank of 2") == 1
    assert "over 3 steps" in printed
