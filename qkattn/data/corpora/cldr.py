"""Translation pairs from Unicode's locale data (CLDR): no download, in any two of its languages.

Babel formats the same date, interval, delay, amount, measure, name or list in both languages. Word
order, inflection and vocabulary differ as in real text, and each source has one correct
translation. It is a test bed, not a benchmark of machine translation. Texts depend on Babel's
version, which is therefore part of the corpus version.
"""

import datetime
import functools
import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Literal

import babel
from babel import Locale, UnknownLocaleError, dates, lists, localedata, numbers, units

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus, parse_languages
from qkattn.errors import ConfigError

# Of the nine categories and the split by the sha256 of the source text.
VERSION = '1.0.0'
SPLITS = ('train', 'validation', 'test')
BABEL = f'babel{babel.__version__}'
# Longer texts on either side are left out; fewer than 1 % are.
MAX_BYTES = 120

# Formats one value in the language of a locale: phrase(locale=...).
Phrase = Callable[..., str]

# Without weeks of the year, which start on different days, and time zones.
SKELETONS = (
    *('yMMMEd', 'yMMMd', 'yMMMM', 'yMMM', 'yQQQQ', 'yMEd', 'yMd', 'MMMEd', 'MMMMd', 'MMMd', 'MEd'),
    *('GyMMMEd', 'GyMMMd', 'Gy'),
)
TIME_SKELETONS = ('EHm', 'EBhm', 'Ehm', 'Bhm', 'Bh', 'h')
INTERVALS = ('yMMMEd', 'yMMMd', 'yMMMM', 'yMEd', 'MMMEd', 'MMMd', 'MEd')
TIME_INTERVALS = ('Hm', 'hm', 'h', 'H')
# Amounts of each unit that are not written in the next larger one.
DELTAS = {'seconds': 50, 'minutes': 50, 'hours': 20, 'days': 5, 'weeks': 3, 'months': 10}
RATES = ('duration-second', 'duration-minute', 'duration-hour', 'duration-day', 'duration-week')
RATED = ('length', 'volume', 'mass', 'energy', 'digital')


def _shared(pair: tuple[Locale, Locale], names: Callable[[Locale], Iterable[str]]) -> list[str]:
    """Names that both languages have, in the same order on every machine."""
    return sorted(set(names(pair[0])).intersection(names(pair[1])))


def _moment(rng: Random) -> datetime.datetime:
    return datetime.datetime(1900, 1, 1) + datetime.timedelta(
        days=rng.randrange(200 * 365), seconds=rng.randrange(24 * 60 * 60)
    )


# Every value is formatted in every form, one form after another: where two forms read alike in the
# source, the first gives the translation of all values, so that there is a rule to learn.
def _dates(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    known = _shared(pair, lambda locale: locale.datetime_skeletons)
    for _ in range(800):
        moment = _moment(rng)
        for width in ('full', 'long', 'medium', 'short'):
            yield functools.partial(dates.format_date, moment.date(), width)
        for skeleton in SKELETONS:
            if skeleton in known:
                yield functools.partial(dates.format_skeleton, skeleton, moment)


def _times(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    known = _shared(pair, lambda locale: locale.datetime_skeletons)
    for _ in range(600):
        moment = _moment(rng)
        for width in ('full', 'medium', 'short'):
            yield functools.partial(dates.format_datetime, moment, width)
        for skeleton in TIME_SKELETONS:
            if skeleton in known:
                yield functools.partial(dates.format_skeleton, skeleton, moment)


def _intervals(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    known = _shared(pair, lambda locale: filter(None, locale.interval_formats))
    for number in range(900):
        start = _moment(rng)
        end = start + datetime.timedelta(days=rng.randrange(1, (6, 60, 600)[number % 3]))
        for skeleton in INTERVALS:
            if skeleton in known:
                yield functools.partial(dates.format_interval, start.date(), end.date(), skeleton)
        end = start + datetime.timedelta(minutes=rng.randrange(60, 480))
        for skeleton in TIME_INTERVALS:
            if skeleton in known and end.date() == start.date():
                yield functools.partial(dates.format_interval, start, end, skeleton)


def _deltas(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    days = {'months': 30.5, 'years': 365.25}
    for unit, most in {**DELTAS, 'years': 99}.items():
        for amount in range(1, most + 1):
            delta = datetime.timedelta(
                **({'days': amount * days[unit]} if unit in days else {unit: amount})
            )
            yield functools.partial(dates.format_timedelta, delta)
            yield functools.partial(dates.format_timedelta, delta, format='short')
            for signed in (delta, -delta):
                yield functools.partial(dates.format_timedelta, signed, add_direction=True)


def _amounts(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    for currency in _shared(pair, lambda locale: locale.currencies):
        for amount in [1, *(rng.randrange(2, 10 ** rng.randrange(1, 7)) for _ in range(16))]:
            yield functools.partial(
                numbers.format_currency, amount, currency, format_type='name', currency_digits=False
            )
        for _ in range(6):
            cents = rng.randrange(10 ** rng.randrange(3, 9))
            yield functools.partial(numbers.format_currency, cents / 100, currency)


def _numbers(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    widths = _shared(pair, lambda locale: locale.compact_decimal_formats)
    for _ in range(700):
        number = rng.randrange(1, 10 ** rng.randrange(4, 13))
        yield functools.partial(numbers.format_decimal, number / 100)
        yield functools.partial(
            numbers.format_percent, number % 10**4 / 1000, decimal_quantization=False
        )
        for width in widths:
            yield functools.partial(
                numbers.format_compact_decimal,
                number,
                format_type=width,  # type: ignore[arg-type]
                fraction_digits=1,
            )


def _measure(rng: Random, unit: str) -> Phrase:
    number = rng.choice((rng.randrange(1, 100), rng.randrange(1, 10**5), rng.randrange(99) / 10))
    return functools.partial(units.format_unit, number, unit)


def _units(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    for unit in _shared(pair, lambda locale: locale.unit_display_names):
        for number in range(24):
            phrase = (
                functools.partial(units.format_unit, 1, unit) if not number else _measure(rng, unit)
            )
            yield functools.partial(phrase, length='long')
            if number < 8:
                yield functools.partial(phrase, length='short')
        if unit.startswith(RATED):
            for rate in RATES:
                for _ in range(5):
                    yield functools.partial(
                        units.format_compound_unit, rng.randrange(1, 500), unit,
                        denominator_unit=rate,
                    )  # fmt: skip


def _names(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    for field in ('territories', 'languages', 'currencies', 'scripts', 'variants'):
        for key in _shared(pair, operator.attrgetter(field)):
            yield functools.partial(_name, field, key)
    for identifier in sorted(localedata.locale_identifiers()):
        named_locale = Locale.parse(identifier)
        yield functools.partial(_locale_name, named_locale)
    for zone in _shared(pair, lambda locale: locale.meta_zones):
        for kind in ('generic', 'standard', 'daylight'):
            yield functools.partial(_zone_name, zone, kind)


def _name(field: str, key: str, locale: Locale) -> str:
    return getattr(locale, field)[key]


def _locale_name(named: Locale, locale: Locale) -> str | None:
    return named.get_display_name(locale)


def _zone_name(zone: str, kind: str, locale: Locale) -> str:
    names = locale.meta_zones[zone]
    return names['long'][kind] if 'long' in names and kind in names['long'] else ''


def _lists(rng: Random, pair: tuple[Locale, Locale]) -> Iterator[Phrase]:
    def listed(items: Sequence[Phrase], style: Literal['standard', 'or']) -> Phrase:
        return lambda locale: lists.format_list(
            [phrase(locale=locale) for phrase in items], style, locale
        )

    known = _shared(pair, lambda locale: locale.list_patterns)
    both: tuple[Literal['standard', 'or'], ...] = ('standard', 'or')
    styles = [style for style in both if style in known]
    for field, count in (('territories', 2600), ('languages', 2600), ('currencies', 1000)):
        known = _shared(pair, operator.attrgetter(field))
        # A few languages name next to nothing.
        for _ in range(count if len(known) >= 4 else 0):
            keys = rng.sample(known, rng.choice((2, 2, 3, 3, 4)))
            for style in styles:
                yield listed([functools.partial(_name, field, key) for key in keys], style)
    known = _shared(pair, lambda locale: locale.unit_display_names)
    for _ in range(2500):
        items = [
            functools.partial(_measure(rng, unit), length='long')
            for unit in rng.sample(known, rng.choice((2, 2, 3)))
        ]
        yield listed(items, rng.choice(styles))


CATEGORIES: Mapping[str, Callable[[Random, tuple[Locale, Locale]], Iterator[Phrase]]] = {
    'dates': _dates,
    'times': _times,
    'intervals': _intervals,
    'deltas': _deltas,
    'amounts': _amounts,
    'numbers': _numbers,
    'units': _units,
    'names': _names,
    'lists': _lists,
}


def pairs(source_language: str, target_language: str) -> Iterator[tuple[str, str, str]]:
    """Category, source text and target text; every source text once, none equal to its target.

    The result depends on the languages and Babel's version only.
    """
    locales = Locale.parse(source_language), Locale.parse(target_language)
    seen = set()
    for category, phrases in CATEGORIES.items():
        for phrase in phrases(Random(f'cldr {category}'), locales):
            source, target = (_tidy(phrase(locale=locale)) for locale in locales)
            if not source or not target or source == target or source in seen:
                continue
            seen.add(source)
            if max(len(source.encode()), len(target.encode())) <= MAX_BYTES:
                yield category, source, target


def _tidy(text: str | None) -> str:
    # Locale data has nine kinds of space that look alike.
    return re.sub(r'\s+', ' ', text or '').strip()


def place(source: str) -> tuple[str, int]:
    """Split of a source text, about 90/5/5, and its rank there, both from its sha256.

    The rank mixes the categories, so that any stretch of a split is a sample of it.
    """
    rank = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8])
    percent = rank * 100 >> 64
    return 'train' if percent < 90 else 'validation' if percent < 95 else 'test', rank


def corpus(config: DataConfig) -> Corpus:
    """The corpus of a pair of languages, source first; composed when it is read.

    Raises:
      ConfigError: for a language that Babel does not know.
    """
    source, target = parse_languages(config)
    languages = _identifier(source, config), _identifier(target, config)
    if languages[0] == languages[1]:
        raise ConfigError(
            f'data.languages={config.languages!r} names one language twice; source and target must '
            'differ.'
        )

    def documents(language: str | None) -> dict[str, list[bytes]]:
        side = languages.index(str(language))
        texts: dict[str, list[bytes]] = {split: [] for split in SPLITS}
        for split, _, *sides in _placed(languages):
            texts[split].append(sides[side].encode())
        return texts

    return Corpus(
        name='cldr-' + '-'.join(languages),
        version=f'{BABEL}-{VERSION}',
        languages=languages,
        splits=SPLITS,
        documents=documents,
    )


# Each side is read for the vocabulary and again for its tokens.
@functools.lru_cache(maxsize=1)
def _placed(languages: tuple[str, str]) -> list[tuple[str, int, str, str]]:
    """Split, rank, source and target of all pairs, in order."""
    return sorted((*place(source), source, target) for _, source, target in pairs(*languages))


def _identifier(language: str, config: DataConfig) -> str:
    """Babel's own spelling, so that a language has one name: 'EN' -> 'en'."""
    try:
        return str(Locale.parse(language))
    except (ValueError, UnknownLocaleError) as error:
        raise ConfigError(
            f'data.languages={config.languages!r}: CLDR has no {language!r}; valid: two of '
            "Babel's locales, such as 'en', 'de', 'fr', 'pt_BR' or 'zh_Hans'."
        ) from error
