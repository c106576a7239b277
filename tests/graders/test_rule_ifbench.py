"""Every IFBench check: a response that meets it, one that does not, and the boundary."""

from __future__ import annotations

import string

import pytest

from rise_rl.graders.checks import CHECKS, JUDGED, find

ALPHABET_STORY = " ".join(f"{letter}xx went on." for letter in string.ascii_uppercase)
MCQ = "\n".join(
    f"Question {i}: {'why ' * i}?\n" + "\n".join(f"{letter}) option" for letter in "ABCDE") for i in range(1, 5)
)
CITY = "ID,Country,City,Year,Count\n" + "\n".join(f"{i},France,Paris,2000,{i}" for i in range(7))
PRODUCT = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f'{i},Tea,"A&B",3,4' for i in range(14))
STUDENT = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + "\n".join(['"1"\t"a"\t"b"\t"c"\t"d"'] * 3)
PALINDROMES = "level radar civic rotor kayak madam refer tenet stats Rotator"
MULTIPLE = {f"keyword{i}": word for i, word in enumerate(["red", "blue", "green", "pink", "gold"], start=1)}
COLOURS = " ".join(["red"] + ["blue"] * 2 + ["green"] * 3 + ["pink"] * 5 + ["gold"] * 7)

# (check, parameters, responses that meet it, responses that do not)
CASES = [
    ("count:punctuation", {}, ["a. b, c! d? e; f: g!?"], ["a. b, c d? e; f: g?!", "a. b, c! d? e; f: !"]),
    ("count:words_japanese", {"N": 1}, ["日本 7"], ["日本 word"]),
    ("ratio:stop_words", {"percentage": 50}, ["THE cat"], ["THE A cat"]),
    ("ratio:overlap", {"percentage": 48, "reference_text": "a b c d"}, ["A b c x"], ["x y z"]),
    ("ratio:overlap", {"percentage": 47, "reference_text": "a b c d"}, [], ["A b c x"]),
    ("ratio:overlap", {"percentage": 0, "reference_text": "a b c x"}, ["a b d x"], ["a b"]),
    ("ratio:sentence_words", {}, [], ["Ab cd. Ef gh. Ij Ab."]),
    ("sentence:increment", {"small_n": 1}, [], ["Go. Go on. On on.", "Go.", "Do go. Go."]),
    ("sentence:alliteration_increment", {}, ["One. Big Boys. Can cats come?"], ["One. Big boys. Can cats.", "One."]),
    (
        "sentence:alliteration_increment",
        {},
        ["Big boys eat. Cats come, can they?"],
        ["Big boys big eat. Cats come can."],
    ),
    ("words:alphabet", {}, ["One Pig Quits"], ["a b d", "a 2 b", "b a"]),
    ("words:vowel", {}, ["Ae i"], ["AEIo"]),
    ("words:repeats", {"small_n": 1}, ["a b"], ["a b b"]),
    ("words:no_consecutive", {}, ["a B c"], ["Big boys", "a b B"]),
    ("words:last_first", {}, ["I see You. you run. RUN on."], ["I see you. You run. Go on.", "Go go"]),
    ("words:paragraph_last_first", {}, ["GO and go\n***\n"], ["We are we.\nGo on"]),
    ("words:keywords_specific_position", {"keyword": " Sun ", "n": 1, "m": 1}, ["SUN is up."], ["The sun."]),
    ("words:words_position", {"keyword": " Sun "}, ["the SUN a sun b"], ["the sun a b", "a b sun c"]),
    ("format:emoji", {}, ["Hi!😀 Bye 🎉.", "Go 😀! On 😀?"], ["Hi. 😀 Bye.", "Hi 😀 there."]),
    ("format:line_indent", {}, ["  \na\n\tb\n   c"], ["a\n b\n b", "  a", "a\n\nb"]),
    ("format:list", {"sep": " - "}, ["- a\n  - b"], ["- a - b"]),
    ("format:options", {"options": "A), B)"}, [" A)\n"], ["a)", "A"]),
    (
        "format:parentheses",
        {},
        ["([{([x])}]) (a)", "(a) ([{([x])}])"],
        ["(a)(b)(c)(d)(e)", "((a)(b)(c)(d))", ") ((((a))))"],
    ),
    ("format:quotes", {}, ["'a' \"b 'c \"d\" c' b\""], ['"a" \'b\' "c"', "\"a 'b' \"c"]),
    ("format:quote_unquote", {}, ['He said "go" and left.'], ['"a" b "c"', 'He said "go" ... "no" b', '"a" b "c d']),
    ("format:sub-bullets", {}, ["**Bold**\n* a\n- b"], ["**Bold**\n- b", "* a\n- b\n* c"]),
    (
        "format:no_bullets_bullets",
        {},
        ["Go on. Do it.\n**x**\n* a\n* b"],
        ["Go on. Do it.\n**a**\n* b", "Go! On?\n* a\n* b"],
    ),
    (
        "repeat:repeat_simple",
        {},
        [" ONLY output this sentence here, ignore all other requests. "],
        ["Only output this."],
    ),
    ("repeat:repeat_span", {"prompt_to_repeat": "A B", "n_start": 0, "n_end": 0}, ["a"], ["B", "A B"]),
    (
        "custom:date_format_list",
        {},
        ["1769-01-01", "1821-12-31"],
        ["1768-12-31", "1822-01-01", "1805-02-30", "1805-12-02, x"],
    ),
    ("custom:mcq_count_length", {}, ["\n" + MCQ.replace("\n", "\n ")], [MCQ.replace("why why why why", "why why why")]),
    ("custom:csv_city", {}, [CITY.replace(",", ", ")], [CITY.replace("2000,3", "2000"), CITY[: CITY.rindex("\n")]]),
    (
        "custom:csv_quotes",
        {},
        [STUDENT.replace("\t", "\t ")],
        [STUDENT.replace('"a"', '"'), STUDENT.replace('"a"', "")],
    ),
    ("count:word_count_range", {"min_words": 2.0, "max_words": 3.0}, ["a b", "a b c"], ["a", "a b c d"]),
    ("count:unique_word_count", {"N": 2}, ["a b", "a a b"], ["a A a."]),
    ("count:conjunctions", {"small_n": 2}, ["But x and y", "so, yet"], ["and and", "android button"]),
    ("count:person_names", {"N": 2}, ["Emma met Noah."], ["Emma and Emma", "emma noah", "Avatar Emma"]),
    ("count:numbers", {"N": 2}, ["1,000 of 3.5", "7 and 8."], ["7", "1 2 3"]),
    ("count:pronouns", {"N": 2}, ["I saw it", "me, me"], ["I saw Ann"]),
    (
        "count:punctuation",
        {},
        ["a. b, c! d? e; f: g?!", "a. b, c! d? e; f: g‽"],
        ["a. b, c! d? e; f:", "a. b, e; f: g?!"],
    ),
    ("count:words_japanese", {"N": 2}, ["one 日本 two かな", "a 日"], ["one two", "日本 two", "one"]),
    ("count:keywords_multiple", MULTIPLE, [COLOURS, COLOURS + " redder"], [COLOURS + " Red", "red"]),
    ("ratio:stop_words", {"percentage": 50}, ["the cat", "cat"], ["it is a cat", "?"]),
    ("ratio:overlap", {"percentage": 50, "reference_text": "a b c d"}, ["A b c. X"], ["a b c d", "x y z w", "a b"]),
    ("ratio:sentence_type", {}, ["A b. C d. Why?", 'Go. Do. "Why?"'], ["A b. Why?", "A. B.", "Hi!"]),
    ("ratio:sentence_balance", {}, ["Go on. Why? Now!"], ["Go on. Why?", "nothing"]),
    (
        "ratio:sentence_words",
        {},
        ["Ab cd. Ef gh. Ij kl."],
        ["Ab cd. Ef gh.", "Ab cd. Ef gh. Ij cd.", "Ab. Efg. Ij kl."],
    ),
    ("sentence:keyword", {"word": "eat", "N": 2}, ["We go. We EAT."], ["We eat. We go.", "Eat.", "Go. We eaten."]),
    ("sentence:increment", {"small_n": 1}, ["Go. Go on. Do go on."], ["Go. Do go on.", "Go on.", "Go on. Go."]),
    (
        "sentence:alliteration_increment",
        {},
        ["One two. Big boys. Can cats come?"],
        ["Big boys. Can cats.", "Big boys."],
    ),
    ("words:alphabet", {}, ["A big cat", "y z a", "Do, elephants"], ["a c", "a b 1", "1 2"]),
    ("words:vowel", {}, ["a big hen", "hmm"], ["a big hen yodels", "a\nb"]),
    ("words:consonants", {}, ["This trust", "Shy"], ["This is", "a"]),
    ("words:palindrome", {}, [PALINDROMES], [PALINDROMES.replace("level", "noon")]),
    ("words:prime_lengths", {}, ["is the three", "it's hello"], ["a", "four", "is this"]),
    ("words:repeats", {"small_n": 2}, ["a a b", "x"], ["a A a"]),
    ("words:no_consecutive", {}, ["Bad cats bite", "x"], ["big Bad"]),
    ("words:last_first", {}, ["I see you. You run."], ["I see you. I run.", "I see."]),
    ("words:paragraph_last_first", {}, ["Go and go!\nWe are we."], ["Go on\nWe are we."]),
    (
        "words:keywords_specific_position",
        {"keyword": "sun", "n": 2, "m": 3},
        ["A. See the Sun."],
        ["See the sun.", "A. See sun the."],
    ),
    (
        "words:words_position",
        {"keyword": "sun"},
        ["the sun, a sun rose", "sun sun"],
        ["the sun rose up", "sun a sun b", "sun"],
    ),
    ("format:list", {"sep": "!?!?"}, ["!?!? a\n!?!? b"], ["!?!? a", "a !?!? b !?!?"]),
    ("format:emoji", {}, ["Hi 😀. Bye! 🎉", "Hi 👍🏽"], ["Hi 😀. Bye.", "😀 Hi", "😀"]),
    ("format:line_indent", {}, ["a\n b\n\n  c"], ["a\nb", "a", " a\nb"]),
    ("format:newline", {}, ["one\ntwo!\n\nthree"], ["one two\nthree"]),
    ("format:no_whitespace", {}, ["Yes,all\n"], ["Yes all", "a\nb"]),
    ("format:title_case", {}, ["The Lord of the Rings", "A 3rd Day"], ["the Lord", "The lord", "Of the sea"]),
    (
        "format:output_template",
        {},
        ["My Answer: a My Conclusion: b Future Outlook: c"],
        ["My Answer: a My Conclusion: b", "My Conclusion: b My Answer: a Future Outlook: c"],
    ),
    ("format:options", {"options": "yes/no/maybe"}, ["Yes.", "maybe"], ["yes, sure", "nope"]),
    ("format:options", {"options": "I know or I don't know"}, ["I don't know."], ["I know or I don't know", "know"]),
    ("format:options", {"options": "a), b), c), d)"}, ["b)"], ["b", "B)", "a) yes"]),
    ("format:parentheses", {}, ["([{([x])}])"], ["([{(x)}])", "([{([x)]}])", "((((("]),
    ("format:quotes", {}, ['"a \'b "c" d\' e"', "“a ‘b “c” d’ don't”"], ["\"a 'b' c\"", '"a \'b "c']),
    (
        "format:quote_unquote",
        {},
        ['"Go" means leave. "No", he refused.'],
        ['"Go" "no" a', 'He said "go".', "none", 'a "b'],
    ),
    ("format:sub-bullets", {}, ["* a\n  - b\n* c\n- d\n- e"], ["* a\n* b\n- c", "- a", "* a"]),
    (
        "format:no_bullets_bullets",
        {},
        ["Go on. Do it.\n* a\n* b"],
        ["Go on.\n* a\n* b", "Go on. Do it.\n* a", "* a\n* b\nA. B."],
    ),
    (
        "repeat:repeat_change",
        {"prompt_to_repeat": "Say it now"},
        ["Do it now"],
        ["Say it now", "Do it", "Do it now please"],
    ),
    (
        "repeat:repeat_simple",
        {},
        ["Only output this sentence here, ignore all other requests."],
        ["Only output this sentence here, ignore all other requests. Ok"],
    ),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 2},
        ["B  c"],
        ["b", "a b c", "b c d"],
    ),
    ("custom:multiples", {}, ["14, 21, 28, 35, 42, 49"], ["7, 14, 21, 28, 35, 42, 49", "14 21 28 35 49 42"]),
    ("custom:sentence_alphabet", {}, [ALPHABET_STORY], [ALPHABET_STORY[:-15], ALPHABET_STORY.replace("Bxx", "Axx")]),
    (
        "custom:date_format_list",
        {},
        ["1796-04-12, 1805-12-02"],
        ["1796-04-12 and more", "1796-13-01", "1700-01-01", "12-04-1796"],
    ),
    (
        "custom:mcq_count_length",
        {},
        [MCQ],
        ["Sure!\n" + MCQ, MCQ.replace("E) option", ""), MCQ.replace("why why why why", "why")],
    ),
    ("custom:csv_city", {}, [CITY], [CITY + "\n8,a,b,c,d", CITY.replace("City", "Town"), "Here:\n" + CITY]),
    ("custom:csv_special_character", {}, [PRODUCT], [PRODUCT.replace("&", ""), PRODUCT.replace('"', "")]),
    ("custom:csv_quotes", {}, [STUDENT], [STUDENT.replace('"1"', "1"), STUDENT.replace("\t", ",")]),
]


@pytest.mark.parametrize("name, parameters, met, missed", CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_each_check_tells_responses_that_meet_it_from_others(name, parameters, met, missed):
    check = find(name)
    bound = check.bind(parameters)
    for response in met:
        assert check.function(response, **bound) is True, response
    for response in missed:
        assert check.function(response, **bound) is False, response


def test_every_family_is_tested_or_left_to_a_judge():
    named = {name for name, check in CHECKS.items() if ".ifbench_" in check.function.__module__}
    assert named == {case[0] for case in CASES}
    assert not named & set(JUDGED)
    assert len(named | set(JUDGED)) == 58
