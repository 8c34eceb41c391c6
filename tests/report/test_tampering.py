"""A study that was changed by hand is found out, or the list of what is not covered names it.

Where the report has to follow a change, it is made again, which enters a further look.
"""

import json
import math
import re

import pytest

from qkattn import report
from qkattn.config import fingerprint_of
from qkattn.errors import ReportError
from qkattn.report import verify
from qkattn.storage import ledger
from qkattn.storage.records import read_json, write_json
from tests.studies import write_lines

pytestmark = pytest.mark.usefixtures('blank')


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_of(study, variant, stage='verdict'):
    (line,) = [
        line
        for line in lines(study / 'plan.jsonl')
        if (line['variant'], line['stage']) == (variant, stage)
    ]
    return line


def edit_results(study, change):
    """Applies `change` to the verdict results of each variant."""
    results = lines(study / 'results.jsonl')
    of: dict[str, list] = {}
    for result in results:
        if result['stage'] == 'verdict':
            of.setdefault(result['variant'], []).append(result)
    change(of)
    write_lines(study / 'results.jsonl', results)


def edit_lines(path, change):
    content = lines(path)
    change(content)
    write_lines(path, content)


def edit_json(path, change):
    content = read_json(path, {})
    change(content)
    write_json(path, content)


def edit_text(path, pattern, replacement):
    text = path.read_text()
    changed, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1 and changed != text
    path.write_text(changed)


def log_of(study, variant, name='metrics.jsonl'):
    return study / run_of(study, variant)['directory'] / name


def relabel_seeds(study):
    def change(of):
        for trial in of['qk/no_o']:
            trial['trial']['seed'] = (trial['trial']['seed'] + 1) % 8

    edit_results(study, change)


def relabel_seeds_in_the_log_too(study):
    relabel_seeds(study)

    def change(log):
        for trial in log[-1]['trials']:
            trial['seed'] = (trial['seed'] + 1) % 8

    edit_lines(log_of(study, 'qk/no_o'), change)


def swap_the_results_of_two_arms(study):
    def change(of):
        for one, other in zip(of['qk/no_o'], of['qk/no_v'], strict=True):
            for name in [name for name in one if name.startswith(('val_', 'test_'))]:
                one[name], other[name] = other[name], one[name]

    edit_results(study, change)


def reorder_trials(study):
    edit_lines(study / 'results.jsonl', lambda all_: all_.append(all_.pop(-3)))


def drop_a_trial(study):
    edit_lines(study / 'results.jsonl', lambda all_: all_.pop())


def lower_a_loss(study):
    def change(of):
        of['qk/no_o'][3]['val_loss'] -= 0.01

    edit_results(study, change)


def lower_a_loss_in_the_log_too(study):
    """Bits per byte and documents are still those of the loss that was measured."""
    lower_a_loss(study)

    def change(log):
        for record in (log[-1], log[-2]):
            record['val_loss'][3] -= 0.01

    edit_lines(log_of(study, 'qk/no_o'), change)


def lower_a_loss_wherever_it_stands(study):
    """Only the hash of results.jsonl at the last look is not that of the file."""
    nats = 0.01

    def change(of):
        of['qk/no_o'][3]['test_loss'] -= nats
        of['qk/no_o'][3]['test_bits_per_byte'] -= nats / 0.6931471805599453

    def change_log(log):
        log[-1]['test_loss'][3] -= nats
        log[-1]['test_bits_per_byte'][3] -= nats / 0.6931471805599453

    def change_documents(documents):
        of = documents['test']
        sums = of['nats'][3]
        of['nats'][3] = [n - nats * t for n, t in zip(sums, of['tokens'], strict=True)]

    edit_results(study, change)
    edit_lines(log_of(study, 'qk/no_o'), change_log)
    edit_json(log_of(study, 'qk/no_o', 'documents.json'), change_documents)


def shift_an_arm_and_look_again(study):
    """All logs of its verdict agree, and the report is that of the new numbers."""
    nats = 0.2
    shifted = [(f'{split}_loss', nats) for split in ('val', 'test')]
    shifted += [(f'{split}_bits_per_byte', nats / 0.6931471805599453) for split in ('val', 'test')]

    def change(of):
        for trial in of['qk/no_o']:
            for name, by in shifted:
                trial[name] -= by

    def change_log(log):
        for record in log:
            for name, by in shifted:
                if record.get(name):
                    record[name] = [value - by for value in record[name]]

    def change_documents(documents):
        for of in documents.values():
            rows = of['nats']
            of['nats'] = [
                [n - nats * t for n, t in zip(r, of['tokens'], strict=True)] for r in rows
            ]

    edit_results(study, change)
    edit_lines(log_of(study, 'qk/no_o'), change_log)
    edit_json(log_of(study, 'qk/no_o', 'documents.json'), change_documents)
    report.write_report(study)


def move_nats_between_documents(study):
    def change(documents):
        for nats in documents['test']['nats']:
            nats[0], nats[1] = nats[0] + 1, nats[1] - 1

    edit_json(log_of(study, 'qk/no_o', 'documents.json'), change)


def change_tokens_of_documents(study):
    """The losses stay, because nats change alike."""

    def change(documents):
        for of in documents.values():
            of['tokens'] = [2 * count for count in of['tokens']]
            of['nats'] = [[2 * value for value in nats] for nats in of['nats']]

    edit_json(log_of(study, 'qk/no_o', 'documents.json'), change)


def lose_the_documents(study):
    log_of(study, 'qk/no_o', 'documents.json').unlink()


def swap_the_results_of_two_arms_with_their_documents(study):
    """The log stays."""
    swap_the_results_of_two_arms(study)
    one, other = (log_of(study, variant, 'documents.json') for variant in ('qk/no_o', 'qk/no_v'))
    content = one.read_text()
    one.write_text(other.read_text())
    other.write_text(content)


def edit_a_metric_from_outside(study):
    def change(of):
        of['qk/no_o'][0]['test_top_3'] += 0.01

    edit_results(study, change)


def edit_a_metric_from_outside_in_the_last_evaluation(study):
    def change(log):
        log[-2]['val_top_3'][0] += 0.01

    edit_lines(log_of(study, 'qk/no_v'), change)


def describe_a_metric_otherwise(study):
    def change(of):
        for result in of['qk/no_o']:
            result['outside_metrics']['top_3']['direction'] = 'lower'

    edit_results(study, change)


def edit_the_final_record(study):
    def change(log):
        log[-1]['test_loss'][0] += 1e-6

    edit_lines(log_of(study, 'qk/no_v'), change)


def edit_the_last_bit_of_the_final_record(study):
    def change(log):
        log[-1]['test_loss'][0] = math.nextafter(log[-1]['test_loss'][0], math.inf)

    edit_lines(log_of(study, 'qk/no_v'), change)


def drop_the_final_record(study):
    edit_lines(log_of(study, 'qk/no_v'), lambda log: log.pop())


def edit_an_earlier_evaluation(study):
    def change(log):
        log[2]['val_loss'][0] += 0.01

    edit_lines(log_of(study, 'qk/no_v'), change)


def edit_the_number_of_tokens(study):
    def change(of):
        for trial in of['qk/no_o']:
            trial['num_tokens'] //= 2

    edit_results(study, change)


def edit_the_residual(study):
    """In the plan as in the results, so that both agree."""
    for name in ('plan.jsonl', 'results.jsonl'):

        def change(all_):
            for line in all_:
                line['residual'] = 0.0

        edit_lines(study / name, change)


def edit_a_parameter_count(study):
    def change(results):
        for trial in results:
            trial['parameters']['attention'] += 1000

    edit_lines(study / 'results.jsonl', change)


def edit_bits_per_byte(study):
    def change(of):
        for trial in of['qk/no_o']:
            trial['val_bits_per_byte'] -= 0.1

    edit_results(study, change)
    edit_lines(
        log_of(study, 'qk/no_o'),
        lambda log: [
            record.update(val_bits_per_byte=[v - 0.1 for v in record['val_bits_per_byte']])
            for record in log
        ],
    )


def edit_the_config_of_a_run(study):
    def change(plan):
        plan[0]['config']['optimizer']['warmup_steps'] += 1

    edit_lines(study / 'plan.jsonl', change)


def widen_the_margin(study):
    edit_json(study / 'study.json', lambda declared: declared.update(margin=0.2))


def widen_the_margin_in_the_ledger_too(study):
    widen_the_margin(study)
    edit_lines(study / 'ledger.jsonl', lambda entries: entries[0].update(margin=0.2))


def declare_other_steps(study):
    def change(declared):
        declared['base']['train']['num_steps'] = 200

    edit_json(study / 'study.json', change)


def without(study, variant):
    """The study as if the arm had never been in it, but for its ledger."""

    def change(declared):
        declared['variants'].remove(variant)
        declared['arms'] = [arm for arm in declared['arms'] if arm['variant'] != variant]

    edit_json(study / 'study.json', change)
    for name in ('plan.jsonl', 'results.jsonl'):
        kept = [line for line in lines(study / name) if line['variant'] != variant]
        write_lines(study / name, kept)


def delete_an_arm(study):
    without(study, 'qk/no_v')
    report.write_report(study)


def delete_an_arm_from_the_ledger_too(study):
    """With the hash of the line made again; the line after it holds the old one."""
    without(study, 'qk/no_v')

    def change(entries):
        entry = entries[0]
        entry['arms'] = [arm for arm in entry['arms'] if arm['variant'] != 'qk/no_v']
        entry |= {'family': 1, 'declaration': ledger.digest(read_json(study / 'study.json', {}))}
        entry['hash'] = ledger.digest_of_entry(entry)

    edit_lines(study / 'ledger.jsonl', change)


def drop_the_last_line_of_the_ledger(study):
    edit_lines(study / 'ledger.jsonl', lambda entries: entries.pop())


def reorder_the_ledger(study):
    ledger.accept(study, 'commits', 'one file of documentation')
    edit_lines(study / 'ledger.jsonl', lambda entries: entries.append(entries.pop(1)))


def add_a_seed(study):
    """To a run, its config, its name, its results and its log."""
    run = run_of(study, 'qk/no_o')
    name = run['run']

    def extend(plan):
        (line,) = [line for line in plan if line['run'] == name]
        line['config']['trials']['seeds'].append(8)
        line['trials'] += 1
        line['run'] = fingerprint_of(line['config'])

    edit_lines(study / 'plan.jsonl', extend)
    renamed = run_of(study, 'qk/no_o')['run']

    def add(results):
        own = [result for result in results if result['run'] == name]
        for result in own:
            result['run'] = result['config_hash'] = renamed
        results.append(own[-1] | {'trial': own[-1]['trial'] | {'seed': 8}})

    edit_lines(study / 'results.jsonl', add)

    def log(records):
        for record in records:
            for values in record.values():
                if isinstance(values, list):
                    values.append(values[-1])
        records[-1]['trials'][-1] = records[-1]['trials'][-1] | {'seed': 8}

    edit_lines(log_of(study, 'qk/no_o'), log)


def edit_a_table(study):
    edit_text(study / 'table.md', r'0\.09', '0.12')


CHANGES = {
    relabel_seeds: 'not the trials of its config in their order',
    relabel_seeds_in_the_log_too: 'not the trials of its config in their order',
    swap_the_results_of_two_arms: 'over its documents, its result has',
    swap_the_results_of_two_arms_with_their_documents: r'val_loss [\d.]+, but [\d.]+ in its log',
    lose_the_documents: 'has results, but documents.json is missing',
    reorder_trials: 'over its documents, its result has',
    drop_a_trial: 'not the trials of its config in their order',
    lower_a_loss: 'over its documents, its result has',
    lower_a_loss_in_the_log_too: 'over its documents, its result has',
    lower_a_loss_wherever_it_stands: 'results.jsonl and logs changed since the last look',
    shift_an_arm_and_look_again: r'last look in ledger\.jsonl; run \w+ is not what look 1 saw;',
    move_nats_between_documents: 'logs changed since the last look',
    change_tokens_of_documents: '131072 tokens of split .validation., but its results 65536',
    edit_a_metric_from_outside: 'has test_top_3 .* in its log',
    edit_a_metric_from_outside_in_the_last_evaluation: 'has val_top_3 .* in its log',
    describe_a_metric_otherwise: "descriptions of metric 'top_3' differ",
    edit_the_final_record: 'has test_loss .* in its log',
    edit_the_last_bit_of_the_final_record: 'has test_loss .* in its log',
    drop_the_final_record: 'does not end with the last evaluation and the final record',
    edit_an_earlier_evaluation: 'logs changed since the last look',
    edit_the_number_of_tokens: 'has num_tokens 153600, which is 307200',
    edit_the_residual: 'has residual 0.0, which is',
    edit_a_parameter_count: r'has parameters\.total \d+, which is \d+ by',
    edit_bits_per_byte: 'has val_bits_per_byte',
    edit_the_config_of_a_run: 'is not the hash of its config',
    widen_the_margin: 'study.json is not what the last declaration',
    widen_the_margin_in_the_ledger_too: r'ledger\.jsonl, line 1 was edited',
    declare_other_steps: 'base_hash of study.json is not the hash of its base',
    delete_an_arm: 'study.json is not what the last declaration',
    delete_an_arm_from_the_ledger_too: r'ledger\.jsonl, line 2 does not follow',
    drop_the_last_line_of_the_ledger: 'changed since the last look',
    reorder_the_ledger: r'ledger\.jsonl, line 2 does not follow',
    add_a_seed: 'has nats of 8 trials, not of 9',
    edit_a_table: r'table\.md is not what its logs give',
}


@pytest.mark.parametrize(
    ('change', 'message'), CHANGES.items(), ids=lambda c: c.__name__ if callable(c) else ''
)
def test_a_study_changed_by_hand_is_found_out(study, change, message):
    change(study)
    with pytest.raises(ReportError, match=message):
        verify.check_study(study)


def draw_another_picture(study):
    (study / 'plots').mkdir()
    (study / 'plots/verdicts.png').write_bytes(b'higher')


def make_training_faster(study):
    def change(results):
        for trial in results:
            trial['train_seconds'] = 1.0

    edit_lines(study / 'results.jsonl', change)
    report.write_report(study)


def write_everything_again(study):
    """An arm that never was, in the ledger too."""
    without(study, 'qk/no_v')
    (study / 'ledger.jsonl').unlink()
    ledger.declare(study, read_json(study / 'study.json', {}))
    report.write_report(study)


@pytest.mark.parametrize(
    ('change', 'named'),
    [
        (draw_another_picture, 'pictures'),
        (make_training_faster, 'times'),
        (write_everything_again, 'a study whose results, logs, report and ledger'),
    ],
)
def test_what_is_not_found_is_listed(study, change, named):
    change(study)
    assert verify.check_study(study) > 50
    assert any(sentence.startswith(named) for sentence in verify.NOT_COVERED)


def test_a_number_of_the_readme_is_found(study, tmp_path):
    page = tmp_path / 'README.md'
    page.write_text('<!-- headline: kept -->\n<!-- end -->\n')
    verify.check_page(page, write=True)
    edit_text(page, r'0\.09', '0.12')
    with pytest.raises(ReportError, match=r'README\.md is not what its studies give'):
        verify.check_page(page)
