#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rejects words from the retired vocabulary in identifiers and, with --prose, also in comments and documents.

lint_names.py [--prose] [FILE ...]; without files, all files tracked by git are checked. `./dev lint` runs it without --prose.
"""
import keyword
import re
import subprocess
import sys
import tokenize

# Words of identifiers (split at underscores and capitals), with their replacements.
WORDS = {
    'most': 'max',
    'fewest': 'min',
    'usual': 'default',
    'told': 'announced, reported',
    'tell': 'announce, publish, report',
    'tells': 'announces',
    'telling': 'announcing',
    'tellings': 'announcements',
    'teller': 'announcer',
    'far': 'remote: of another host',
    'leg': 'transfer',
    'legs': 'transfers',
    'room': 'capacity, storage, or what it is: slots, bytes',
    'rooms': 'capacity, storage, or what it is: slots, bytes',
    'roomy': 'large',
    'come': 'arrive',
    'comes': 'arrives',
    'came': 'arrived',
    'who': 'a noun: peer, rank, origin',
    'whom': 'a noun: peer, rank',
    'whose': 'a noun: owner',
    'whoever': 'a noun',
    'graves': 'deferred frees',
    'bury': 'defer, push',
    'yard': 'leftovers',
    'unasked': 'by_default',
}
# Adjacent words within an identifier.
PHRASES = {
    ('let', 'go'): 'release',
    ('i', 'stand'): 'is_proxy_of_peer',
    ('stands', 'for'): 'peer_is_my_proxy',
    ('under', 'way'): 'in_progress, in_flight',
    ('it', 'can'): 'a noun',
    ('goes', 'on'): 'proceeds',
}
# Last words of compound identifiers.
ENDINGS = {'here': 'local_..., own_...', 'there': 'remote_..., file_...'}

# Exact identifiers that may remain, each with the reason.
PUBLIC = 'public, renamed separately'
ALLOWED = {
    'at_most': 'an upper bound, in English',
    'layer_told': 'the name of a flag in wait reports and in documents',
    'wait_told': 'the name of an event in traces, which tools read',
}
ALLOWED.update(dict.fromkeys((
    'num_local_experts', '_experts_here',
    'max_rows', '_most_rows', 'sy_exchange_max_rows',
    'default_pieces', 'default_ring',
    'kMinPieceColumns', 'kMaxChunkKib', 'kMaxCombineWarps', 'kMaxCountedExperts', 'kMaxDecodeRows', 'kMaxDecodeTokens',
    'kMaxDispatchStages', 'kMaxDispatchWarps', 'kMaxGemmColumns', 'kMaxGemmExperts', 'kMaxLedgerWarps',
    'kMaxLowLatencyWarps', 'kMaxPieceColumns', 'kMaxDefaultPieces', 'kDefaultChannels', 'kDefaultChunkKib', 'kDefaultRingRows',
    # Names in python/switchyard that its tests use.
    '_most_sms', '_most_tokens',
), PUBLIC))
# Files whose names are renamed separately. This replaces a list of the Python package's private names.
SEPARATE = ('python/switchyard/', 'python/tests/drop_in/test_deep_ep.py')

# Prose patterns, checked with --prose, and their replacements.
PROSE = {
    r'(?:^|[.:;] )Of (?!course\b)': 'a sentence begins with its subject',
    r'\btold\b': 'announced, reported, named',
    r'\blet go\b': 'released',
    r'\bWhoever\b': 'the caller, the rank that',
    r'\bmost_\w+': 'max_...',
    r'\busual_\w+': 'default_...',
    r'\bThe same,': 'say what it is',
}

SOURCES = ('.c', '.h', '.cpp', '.hpp', '.cu', '.cuh', '.def')
PIECES = re.compile(r'(?P<comment>//[^\n]*|/\*.*?\*/)|R"(?P<d>\w*)\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|'
                    r"(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'", re.S)
IDENTIFIER = re.compile(r'\b[A-Za-z_]\w*')
# Test names are sentences.
TEST = re.compile(r'\b(?:TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P|INSTANTIATE_TEST_SUITE_P)\(\s*\w+,\s*\w+|'
                  r'\bREGISTER_TYPED_TEST_SUITE_P\([^;]*;')
PYTHON_TEST = re.compile(r'test_\w+')


def words_of(name):
    name = re.sub(r'([a-z0-9])([A-Z])', r'\1_\2', name)
    name = re.sub(r'([A-Z]+)([A-Z][a-z])', r'\1_\2', name)
    return [w for w in name.lower().split('_') if w]


def problem_of(name):
    if name in ALLOWED or PYTHON_TEST.fullmatch(name):
        return None
    words = words_of(name)
    for word in words:
        if word in WORDS:
            return f"'{word}': {WORDS[word]}"
    for pair in zip(words, words[1:]):
        if pair in PHRASES:
            return f"'{'_'.join(pair)}': {PHRASES[pair]}"
    if len(words) > 1 and words[-1] in ENDINGS:
        return f"'_{words[-1]}': {ENDINGS[words[-1]]}"
    return None


def blank(text):
    return re.sub(r'[^\n]', ' ', text)


def split_source(text):
    """The code and the comments of a C++, CUDA or C source, each with all its line breaks."""
    code = TEST.sub(lambda m: blank(m[0]), PIECES.sub(lambda m: blank(m[0]), text))
    comments, at = [], 0
    for m in PIECES.finditer(text):
        if m['comment']:
            comments.append(blank(text[at:m.start()]) + m[0])
            at = m.end()
    return code, ''.join(comments)


def split_python(path):
    """The (line, identifier) and (line, comment) pairs of a Python source file."""
    names, comments = [], []
    with open(path, 'rb') as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                names.append((token.start[0], token.string))
            elif token.type == tokenize.COMMENT:
                comments.append((token.start[0], token.string))
    return names, comments


def is_source(path):
    return path.endswith(SOURCES + ('.py',))


def lint(path, with_prose):
    found, prose = [], []
    if path.endswith('.py'):
        names, prose = split_python(path)
    else:
        with open(path, encoding='utf-8') as file:
            text = file.read()
        names = []
        if path.endswith(SOURCES):
            code, comments = split_source(text)
            names = [(n, m[0]) for n, line in enumerate(code.split('\n'), 1) for m in IDENTIFIER.finditer(line)]
            # Without comment markers, so that a pattern can match the beginning of a sentence.
            prose = [(n, re.sub(r'^[\s/*<!]+', '', line)) for n, line in enumerate(comments.split('\n'), 1)]
        else:
            prose = list(enumerate(text.split('\n'), 1))
    seen = set()
    for n, name in [] if path.startswith(SEPARATE) else names:
        problem = problem_of(name)
        if problem and name not in seen:
            seen.add(name)
            found.append(f'{path}:{n}: {name}: {problem}')
    if with_prose:
        for n, line in prose:
            line = re.sub(r'`[^`]*`', '``', line)
            for pattern, instead in PROSE.items():
                m = re.search(pattern, line)
                if m:
                    found.append(f"{path}:{n}: '{m[0].strip()}': {instead}")
    return found


def main():
    with_prose = '--prose' in sys.argv[1:]
    files = [a for a in sys.argv[1:] if not a.startswith('--')]
    if not files:
        files = subprocess.run(['git', 'ls-files'], check=True, capture_output=True, text=True).stdout.split('\n')
    files = [f for f in files if f and f != 'scripts/lint_names.py' and
             (is_source(f) or with_prose and f.startswith('docs/') and f.endswith('.md'))]
    found = [line for f in files for line in lint(f, with_prose)]
    print('\n'.join(found), end='\n' if found else '')
    if found:
        print('lint_names: the words above are retired (scripts/lint_names.py says what to use; ALLOWED there takes exceptions)')
    sys.exit(1 if found else 0)


main()
