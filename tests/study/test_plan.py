"""The runs of a study: what is known grows with the results, and never otherwise."""

import dataclasses
import math
import re
import shlex
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from qkattn.config import Config, ControlsConfig, Study, TuningConfig, from_json
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.stats.sweep import Sweep
from qkattn.study import declaration, plan
from qkattn.study.arms import build_arms
from qkattn.study.tuning import KNOBS, tune, with_knob

TRIALS = {'seeds': (0, 1, 2), 'learning_rates': (1e-3, 2e-3, 4e-3), 'weight_decays': (0.1,)}
MODEL = {'num_layers': 1, 'context': 16}
STUDY = Study(
    name='small',
    base=from_json(Config, {'model': MODEL, 'optimizer': {'decay': 'coupled'}, 'trials': TRIALS}),
    variants=('qk/vo', 'shared_qk/vo'),
    sizes=('d_model=32',),
    tolerance=1e-2,
    tuning=TuningConfig(seeds=(10, 11), max_points=6, max_seeds=2),
    controls=ControlsConfig(equal_shape=False, longer=None),
)
GRID = (1e-3, 2e-3, 4e-3)


def study_with(study=STUDY, **fields):
    """Returns a copy of a study with other fields.

    A dict replaces fields in a section of the study's config. For example, margin=0.01 replaces the
    margin, and trials={'seeds': (0, 1)} replaces the seeds in the section `trials`.
    """
    base = study.base
    for section in vars(base):
        if section in fields:
            old_section = getattr(base, section)
            new_section = dataclasses.replace(old_section, **fields.pop(section))
            base = dataclasses.replace(base, **{section: new_section})
    return dataclasses.replace(study, base=base, **fields)


@pytest.fixture(scope='module')
def arms():
    return build_arms(STUDY)


def no_results(run):
    """No run has results."""


def no_effect(run, trial):
    return 0.0


def parabola_results(optimum, effect=no_effect):
    """Returns a function that makes up the results of a run, a list with one for each trial.

    The loss of a trial is 2 + 0.01 seed + 0.1 ln(learning rate / optimum)^2.

    Args:
        optimum: The learning rate with the lowest loss.
        effect: effect(run, trial) is added to the test loss of a trial. If it is None, the trial
            diverges. The losses of diverged trials are 0, which must not count as the best.
    """

    def results(run):
        """Returns the result of each trial of a run: its settings, status and losses."""
        trials = []
        for trial in run.config.trials.trials():
            distance = math.log(trial['learning_rate'] / optimum)
            loss = 2 + 0.01 * trial['seed'] + 0.1 * distance**2
            change = effect(run, trial)
            if change is None:
                fields = {'status': 'diverged', 'val_loss': 0.0, 'test_loss': 0.0}
            else:
                fields = {'status': 'finished', 'val_loss': loss, 'test_loss': loss + change}
            trials.append({'trial': trial, **fields})
        return trials

    return results


def one_seed_diverges_at_the_last_rate(run, trial):
    diverges = trial['seed'] == 11 and trial['learning_rate'] == 4e-3
    return None if diverges else 0.0


@pytest.mark.parametrize(
    # parabola_results(r) gives losses that are lowest at the learning rate r.
    # `rates` has the learning rates of each run, a tuple for each. The last run is the verdict run,
    # and all others are screening runs. Without results, there is only a screening run.
    ('results', 'rates'),
    [
        # The results of the first run decide on further runs.
        pytest.param(no_results, [(1e-3, 2e-3, 4e-3)], id='unfinished'),
        # The verdict run trains at the optimum.
        pytest.param(parabola_results(2.3e-3), [(1e-3, 2e-3, 4e-3), (0.0023,)], id='bracketed'),
        # While the highest rate is the best, the next run tries a rate twice as high.
        pytest.param(
            parabola_results(7e-3),
            [(1e-3, 2e-3, 4e-3), (8e-3,), (1.6e-2,), (0.007,)],
            id='the grid is extended',
        ),
        # Six rates, max_points, are tried. Then the verdict run trains at the best of them.
        pytest.param(
            parabola_results(1e-6),
            [(1e-3, 2e-3, 4e-3), (5e-4,), (2.5e-4,), (1.25e-4,), (1.25e-4,)],
            id='the grid is extended to max_points',
        ),
        # A seed diverged at 4e-3, so that rate counts as worse than 2e-3.
        pytest.param(
            parabola_results(7e-3, one_seed_diverges_at_the_last_rate),
            [(1e-3, 2e-3, 4e-3), (2e-3,)],
            id='bracketed by a divergence',
        ),
    ],
)
def test_an_arm_is_screened_until_bracketed_then_judged_on_fresh_seeds(arms, results, rates):
    """Screening runs try learning rates until the best rate lies between worse rates.

    Then a verdict run trains other seeds at the tuned rate.
    """
    arm = arms[0]

    runs = plan.runs(STUDY, [arm], results)

    assert [run.config.trials.learning_rates for run in runs] == rates
    screening_runs = runs if len(runs) == 1 else runs[:-1]
    for run in screening_runs:
        assert run.stage == 'screening'
        assert run.config.trials.seeds == (10, 11)
    if len(runs) > 1:
        assert runs[-1].stage == 'verdict'
        assert runs[-1].config.trials.seeds == (0, 1, 2)
    assert runs[-1].config.model == arm.model


def declared_command(monkeypatch, arms, arguments):
    """The command in the declaration of a study that python was started on with these arguments."""
    monkeypatch.setattr(sys, 'orig_argv', ['/bin/python3', *arguments])
    return declaration.content(STUDY, arms)['command']


def test_the_declared_command_names_no_directory_of_the_machine(arms, monkeypatch):
    arguments = ['/home/ann/ablate.py', '--workdir=/home/ann/runs/a b']
    command = declared_command(monkeypatch, arms, arguments)
    assert shlex.split(command) == ['python', 'ablate.py', '--workdir=a b']


def test_a_shell_reads_the_declared_command_as_it_was_typed(arms, monkeypatch):
    arguments = ['-m', 'experiments.ablate', '--config.variants=("qk/vo", "qk/no_v")']
    command = declared_command(monkeypatch, arms, arguments)
    assert shlex.split(command) == ['python', *arguments]


def test_a_declaration_has_every_tuned_grid(arms):
    declared = declaration.content(STUDY, arms)
    assert declared['tuning']['learning_rates'] == list(GRID)


def test_a_declaration_has_the_field_looks_of_earlier_versions(arms):
    """`looks` lists the number of verdict seeds. The hash of a declaration includes it."""
    assert declaration.content(STUDY, arms)['looks'] == [3]

    untuned = study_with(tuning=TuningConfig())
    assert declaration.content(untuned, arms)['looks'] == []


def test_an_untuned_study_has_a_single_run_of_each_arm(arms):
    untuned = study_with(tuning=TuningConfig())

    runs = plan.runs(untuned, arms, no_results)

    assert [run.arm for run in runs] == arms
    assert runs[0].stage == 'single'
    assert runs[0].config.trials == STUDY.base.trials
    assert runs[0].directory == f'runs/qk-vo-d_model=32-{runs[0].id}'


def test_the_name_of_a_run_directory_is_cut_to_what_file_systems_allow(arms, tmp_path):
    """The hash stays at the end of the name, and no character of two bytes is divided."""
    long_key = arms[0].key._replace(variant='qk/vo' + 300 * 'ü')
    long_arm = dataclasses.replace(arms[0], key=long_key)

    (run,) = plan.runs(study_with(tuning=TuningConfig()), [long_arm], no_results)

    # 5 of 242 bytes are those of 'qk-vo', so half of a character is left over.
    assert run.directory == f'runs/qk-vo{118 * "ü"}-{run.id}'
    (tmp_path / run.directory).mkdir(parents=True)


def query_free_is_better(run, trial):
    """A little noise for every arm. Losses of query_free/vo are also lower by 0.5."""
    noise = 0.02 * math.sin(trial['seed'] + 10 * len(run.arm.key.variant))
    if run.config.model.score == 'query_free':
        return noise - 0.5
    return noise


# With these results, query_free/vo is better, and shared_qk/vo stays undecided.
DECIDING = parabola_results(2.5e-3, query_free_is_better)


def longer_runs_of(runs):
    return [run for run in runs if run.arm.key.control == 'longer']


@pytest.fixture(scope='module')
def controlled_study():
    """A study of three variants, whose controls have the same shape or are trained longer."""
    return study_with(
        variants=('qk/vo', 'shared_qk/vo', 'query_free/vo'),
        controls=ControlsConfig(),
        sizes=('d_model=64',),
    )


@pytest.fixture(scope='module')
def controlled_arms(controlled_study):
    return build_arms(controlled_study)


@pytest.fixture(scope='module')
def decided_plan(controlled_study, controlled_arms):
    """All runs of the controlled study. query_free/vo is better, shared_qk/vo is undecided."""
    return plan.runs(controlled_study, controlled_arms, DECIDING)


def test_decided_arms_are_trained_longer_beside_the_baseline(decided_plan):
    longer_runs = longer_runs_of(decided_plan)

    # The longer runs come last.
    assert decided_plan[-len(longer_runs) :] == longer_runs

    # The undecided shared_qk/vo is not trained longer.
    verdicts = [run for run in longer_runs if run.stage == 'verdict']
    assert [run.arm.key.variant for run in verdicts] == ['qk/vo', 'query_free/vo']


def test_longer_training_is_screened_around_the_chosen_learning_rate(decided_plan):
    verdict = next(run for run in decided_plan if run.stage == 'verdict')
    (chosen,) = verdict.config.trials.learning_rates

    screening = longer_runs_of(decided_plan)[0]

    expected = (chosen / 2, chosen, chosen * 2)
    assert screening.config.trials.learning_rates == pytest.approx(expected)


def test_longer_training_multiplies_steps_alone(decided_plan):
    base = STUDY.base
    # STUDY trains for 1000 steps, with an evaluation and a checkpoint every 100.
    train = dataclasses.replace(base.train, num_steps=4000, eval_every=400, checkpoint_every=400)
    for run in longer_runs_of(decided_plan):
        assert run.config.train == train
        assert run.config.optimizer.warmup_steps == 4 * base.optimizer.warmup_steps
        seeds = (0, 1, 2) if run.stage == 'verdict' else (10, 11)
        assert run.config.trials.seeds == seeds
        assert run.config.model == run.arm.model


def test_longer_training_may_have_verdict_seeds_of_its_own(controlled_study, controlled_arms):
    controls = ControlsConfig(longer_seeds=(5, 6, 7))
    study = dataclasses.replace(controlled_study, controls=controls)

    runs = longer_runs_of(plan.runs(study, controlled_arms, DECIDING))

    seeds = {run.config.trials.seeds for run in runs}
    assert seeds == {(10, 11), (5, 6, 7)}  # of screening and verdict


NOISE_OF_SEED = (0.010, -0.012, 0.004, -0.008, 0.011, -0.005)


@pytest.mark.parametrize(
    # `difference` is the loss of shared_qk/vo minus the loss of qk/vo at d_model=64, in nats/token.
    # `num_longer_arms` is 2 if that arm is decided: the arm and its baseline are trained longer.
    ('difference', 'diverged_seeds', 'sizes', 'num_longer_arms'),
    [
        # p = 0.025 is below the level of a single comparison, 0.04.
        pytest.param(0.0125, (), ('d_model=64',), 2, id='one arm'),
        # p = 0.025 is above the level of each of three comparisons, 0.04 / 3 = 0.013.
        pytest.param(0.0125, (), ('d_model=64', 'd_model=72', 'd_model=80'), 0, id='three arms'),
        # Far lower losses do not make an arm better if any of its seeds diverged.
        pytest.param(-0.2, (1,), ('d_model=64',), 0, id='a seed diverged'),
        pytest.param(-0.2, (0, 1, 2, 3, 4, 5), ('d_model=64',), 0, id='every seed diverged'),
    ],
)
def test_a_difference_is_decided_after_correction_for_all_arms_and_sizes(
    difference, diverged_seeds, sizes, num_longer_arms
):
    """p values are corrected for all arms and sizes. Decided arms are then trained longer."""
    verdict_seeds = (0, 1, 2, 3, 4, 5)

    def effect(run, trial):
        """Returns what is added to the test loss of a trial, or None if it diverges."""
        seed = trial['seed']
        if seed not in verdict_seeds or run.arm.variant == 'qk/vo':
            return 0.0
        if run.arm.key.size != 'd_model=64':
            # The arms of other sizes stay undecided, because their seeds differ too much.
            return 3.0 * (-1) ** seed
        if seed in diverged_seeds:
            return None
        return difference + NOISE_OF_SEED[seed]

    controls = ControlsConfig(equal_shape=False)
    study = study_with(trials={'seeds': verdict_seeds}, sizes=sizes, controls=controls)

    runs = plan.runs(study, build_arms(study), parabola_results(2.5e-3, effect))

    longer_arms = {run.arm.key for run in longer_runs_of(runs)}
    assert len(longer_arms) == num_longer_arms


@pytest.mark.parametrize('index', [0, -1], ids=['the first finishes', 'the last finishes'])
def test_the_plan_does_not_depend_on_the_order_in_which_runs_finish(
    controlled_study, controlled_arms, index
):
    """The plan is made again after each run, because results decide on further runs.

    In the end, it equals the plan from all results at once.
    """
    arms = [arm for arm in controlled_arms if arm.variant != 'shared_qk/vo']
    results_by_id = {}

    def results_so_far(run):
        """Returns the results of a run, or None if it has not finished."""
        return results_by_id.get(run.id)

    runs = plan.runs(controlled_study, arms, results_so_far)
    unfinished = runs
    while unfinished:
        run = unfinished[index]
        results_by_id[run.id] = DECIDING(run)
        runs = plan.runs(controlled_study, arms, results_so_far)
        unfinished = [run for run in runs if run.id not in results_by_id]

    plan_of_all_results = plan.runs(controlled_study, arms, DECIDING)
    assert runs == plan_of_all_results


@dataclasses.dataclass
class Screening:
    """A finished screening of learning rates."""

    sweep: Sweep
    losses: dict  # losses by settings and seed
    asked: list  # (values, seeds) in the order in which `tune` asked for them


# A grid with a single value is not tuned, so only the learning rate is.
GRIDS = {knob: (1.0,) for knob in KNOBS} | {'learning_rate': GRID}


def never(rate, seed):
    return False


def simulated_loss(rate, seed, sd):
    """The loss is 2 + 0.11 seed + 0.1 ln(rate / 2.2e-3)^2, plus noise.

    The noise has the standard deviation `sd`, and differs between rates and seeds.
    """
    distance = math.log(rate / 2.2e-3)
    level = 2 + 0.11 * seed
    generator = np.random.default_rng([seed, round(1e7 * rate)])
    noise = sd * generator.normal()
    return level + 0.1 * distance**2 + noise


def screen(limits, sd, diverged=never):
    """Tunes the learning rate: measures what `tune` asks for, until it asks for nothing.

    Args:
        limits: The first seeds, and how far the grid and the seeds may grow.
        sd: The standard deviation of the noise of `simulated_loss`.
        diverged: diverged(rate, seed) is true if that trial diverges.
    """
    measured = {}
    asked = []
    tuning = tune(GRIDS, limits, measured, decay='coupled')
    while tuning.knob is not None:
        asked.append((tuning.values, tuning.seeds))
        for rate in tuning.values:
            loss_by_seed = measured.setdefault(tuning.at(rate), {})
            for seed in tuning.seeds:
                assert seed not in loss_by_seed  # nothing is measured twice
                is_diverged = diverged(rate, seed)
                loss_by_seed[seed] = None if is_diverged else simulated_loss(rate, seed, sd)
        tuning = tune(GRIDS, limits, measured, decay='coupled')
    return Screening(tuning.sweeps['learning_rate'], measured, asked)


LIMITS = TuningConfig(seeds=(10, 11), max_points=5, max_seeds=12)


@pytest.mark.parametrize('sd', [1e-4, 0.08])
def test_losses_at_a_rate_that_was_not_asked_for_change_nothing(sd):
    losses = screen(LIMITS, sd).losses
    tuning = tune(GRIDS, LIMITS, losses, decay='coupled')

    # The grid lacks 5e-3. Losses of 0 there would be the lowest ones.
    settings = with_knob(tuning.settings, 'learning_rate', 5e-3)
    losses_with_another_rate = losses | {settings: {10: 0.0, 11: 0.0}}

    assert tune(GRIDS, LIMITS, losses_with_another_rate, decay='coupled') == tuning


def test_a_significant_bracket_takes_the_first_seeds_alone():
    screening = screen(LIMITS, sd=1e-4)
    assert screening.asked == [(GRID, (10, 11))]
    assert screening.sweep.chosen == pytest.approx(2.2e-3, rel=1e-2)


def test_further_seeds_are_drawn_until_the_bracket_is_significant():
    """A best rate is bracketed if a test over seeds finds a lower and a higher rate worse.

    With noisy losses, two seeds are too few for that test, so the tuning asks for more.
    """
    limits = TuningConfig(seeds=(10, 11), max_points=5, max_seeds=12)

    screening = screen(limits, sd=0.08)

    # Two seeds at a time are drawn. With max_seeds=12, the last possible seed is 21.
    drawn_seeds = [seeds for _, seeds in screening.asked]
    last_seed = drawn_seeds[-1][-1]
    assert drawn_seeds[0] == (10, 11)
    assert (12, 13) in drawn_seeds
    assert last_seed < 21

    # These seeds are enough to bracket the best rate, and to bound the optimum.
    assert screening.sweep.bracketed
    assert screening.sweep.optimum_low

    # All rates have the same seeds, so the 0.11 seed in `simulated_loss` cancels in comparisons.
    every_seed = list(range(10, last_seed + 1))
    for losses_by_seed in screening.losses.values():
        assert list(losses_by_seed) == every_seed


def test_further_seeds_are_drawn_until_the_excess_loss_is_small():
    # The limit is half of the bound that two seeds reach, so the tuning has to ask for more.
    bound_of_two_seeds = screen(LIMITS, sd=0.01).sweep.at_worst
    max_excess = bound_of_two_seeds / 2
    limits = dataclasses.replace(LIMITS, max_excess=max_excess, max_seeds=16)

    screening = screen(limits, sd=0.01)

    assert len(screening.asked) > 1
    assert screening.sweep.at_worst <= max_excess


def test_a_value_at_which_a_seed_diverged_gets_no_further_seeds():
    """A learning rate at which a seed diverged cannot be the best, so it needs no more seeds.

    The first seeds are 10 and 11. The noise makes the tuning ask for more at other rates.
    """
    limits = TuningConfig(seeds=(10, 11), max_points=5, max_seeds=6)

    def diverged(rate, seed):
        return rate > 3e-3 and seed == 11

    screening = screen(limits, sd=0.1, diverged=diverged)

    # settings[0] is the learning rate.
    num_seeds = {settings[0]: len(losses) for settings, losses in screening.losses.items()}
    # Seed 11 diverges at 4e-3, the highest rate of the grid. No higher rate is tried.
    rates_that_diverged = [rate for rate in num_seeds if rate > 3e-3]
    assert rates_that_diverged == [4e-3]
    assert num_seeds[4e-3] == 2
    assert max(num_seeds.values()) > 2


@pytest.fixture(scope='module')
def costly_study():
    """A tuned study of two arms at two sizes. Each arm is also trained longer if it is decided."""
    return study_with(
        sizes=('d_model=32', 'd_model=64'),
        controls=ControlsConfig(equal_shape=False),
        optimizer={'warmup_steps': 10},
        train={'num_steps': 100, 'batch_size': 4},
    )


@pytest.fixture(scope='module')
def costly_arms(costly_study):
    return build_arms(costly_study)


def test_the_least_cost_of_a_plan_supposes_every_optimum_inside_its_grid(costly_study, costly_arms):
    """In the cheapest plan, no grid grows: each arm has one screening run and one verdict run.

    The plan also trains each arm longer. The study has 2 arms at 2 sizes.
    """
    runs = plan.fewest_runs(costly_study, costly_arms)

    # A screening has the first grid of learning rates. A verdict trains at the middle rate.
    rates = {run.config.trials.learning_rates for run in runs}
    assert rates == {(1e-3, 2e-3, 4e-3), (2e-3,)}

    # Each arm has a screening and a verdict. Both are repeated with 4 times the 100 steps.
    num_arms = 2 * 2
    total = plan.cost(runs)
    assert total.runs == num_arms * 4

    # A screening has 2 seeds at 3 rates, and a verdict has 3 seeds at one rate.
    trials_of_arm = 2 * 3 + 3
    assert total.trials == num_arms * 2 * trials_of_arm

    tokens_of_step = 4 * 16  # 4 rows of 16 tokens
    steps_of_trial = 100 + 4 * 100  # usual and longer
    tokens_of_arm = trials_of_arm * steps_of_trial * tokens_of_step
    assert total.tokens == num_arms * tokens_of_arm

    # A training step costs as much as 3 forward passes.
    flops = sum(tokens_of_arm * 3 * cost.flops_per_token(arm.model) for arm in costly_arms)
    assert total.flops == pytest.approx(flops)


def estimated_tables(study, arms, **options):
    """The lines of the table by arm, and the lines of the table by stage with its notes."""
    by_arm, by_stage = plan.estimate(study, arms, **options).split('\n\n')
    return lines_with_single_spaces(by_arm), lines_with_single_spaces(by_stage)


def lines_with_single_spaces(text):
    return [' '.join(line.split()) for line in text.splitlines()]


def test_a_plan_is_counted_by_arm_and_by_stage_without_a_measurement(
    costly_study, costly_arms, monkeypatch
):
    """The estimate of a plan has two tables, one by arm and one by stage.

    The study has 2 arms at 2 sizes. Each has a screening and a verdict, and both again for longer
    training.
    """
    monkeypatch.setattr(plan.program, 'warm_up', lambda _: pytest.fail('it measures'))

    by_arm, by_stage = estimated_tables(costly_study, costly_arms)

    # A screening has 6 trials and a verdict has 3. Each trial takes 100 steps of 4 * 16 tokens.
    tokens = 9 * 100 * 4 * 16
    # A training step costs as much as 3 forward passes.
    flops = 3 * cost.flops_per_token(costly_arms[0].model) * tokens
    # The columns are: arm, runs, trials, tokens, FLOPs.
    assert by_arm[2] == f'qk/vo d_model=32 2 9 {tokens:.3g} {flops:.3g}'

    # The rows are both arms at d_model=32 and at d_model=64, then the same arms trained longer.
    rows = by_arm[2:-1]
    titles = [row.partition(' d_model')[0] for row in rows]
    assert titles == [
        'qk/vo',
        'shared_qk/vo',
        'qk/vo',
        'shared_qk/vo',
        'qk/vo (longer)',
        'shared_qk/vo (longer)',
        'qk/vo (longer)',
        'shared_qk/vo (longer)',
    ]
    num_trials = [int(row.split()[-3]) for row in rows]
    assert sum(num_trials) == 8 * 9

    # Both tables end with the same total. A note follows the table by stage.
    assert by_stage[0] == 'stage runs trials tokens FLOPs'
    assert by_arm[-1].startswith('total ')
    assert by_stage[-2] == by_arm[-1]
    assert by_stage[-1].startswith('lower bounds')


def test_the_time_of_a_plan_is_measured_once_per_size(costly_study, costly_arms, monkeypatch):
    """The time of all runs of a size is estimated from a few steps of one run.

    The study has 2 arms at 2 sizes. Its plan has 8 runs of 100 steps and 8 of 400.
    """
    measured_models = []

    def warm_up(config):
        """Replaces the timing of a few steps: a step takes a second, compilation a minute."""
        measured_models.append((config.model.score, config.model.d_model))
        return 1.0, 60.0

    monkeypatch.setattr(plan.program, 'warm_up', warm_up)

    _, by_stage = estimated_tables(costly_study, costly_arms, measure=True)

    # Only the baseline is measured, at both sizes.
    assert measured_models == [('qk', 32), ('qk', 64)]

    # The first numbers of a row are its runs and its trials.
    assert by_stage[4].startswith('longer, if every arm is decided 8 36')
    assert by_stage[5].startswith('total 16 72')
    # A screening of 6 trials takes 100 s, so a verdict of 3 trials takes 50 s.
    # Four of each take 4 * (100 + 50) = 600 s. The longer runs take 4 * 600 = 2400 s.
    # Compilation takes 16 * 60 = 960 s, so the sum is 3960 s = 1:06:00.
    # The total is a second less, because shared_qk/vo has slightly fewer FLOPs than qk/vo.
    assert by_stage[5].endswith(' 1:05:59')


@pytest.mark.parametrize(
    'error', [ConfigError('it needs 200 GiB'), JaxRuntimeError('RESOURCE_EXHAUSTED: it')]
)
def test_a_machine_that_cannot_train_a_plan_gives_its_cost_without_time(
    costly_study, costly_arms, monkeypatch, error
):
    """If a plan is too large for this machine, no time is measured.

    The table by stage still has the cost. A note with the error says why the time is missing.
    """
    monkeypatch.setattr(plan.program, 'warm_up', Mock(side_effect=error))

    _, by_stage = estimated_tables(costly_study, costly_arms, measure=True)

    # The total has 16 runs and 72 trials, and a dash in place of a time.
    total = by_stage[5]
    assert total.startswith('total 16 72')
    assert total.endswith(' -')
    # Both errors contain the word 'it'.
    note = by_stage[6]
    assert re.match('no time, as this machine cannot train it: .*it', note)


def test_a_bug_in_the_warm_up_of_a_plan_is_raised(costly_study, costly_arms, monkeypatch):
    monkeypatch.setattr(plan.program, 'warm_up', Mock(side_effect=JaxRuntimeError('a bug')))
    with pytest.raises(JaxRuntimeError, match='a bug'):
        plan.estimate(costly_study, costly_arms, measure=True)
