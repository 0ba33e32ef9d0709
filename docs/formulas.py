"""Converts formulas of docstrings, such as ``theta_t = base^(-2t/w)``, to LaTeX; decides which code is a formula."""

import html
import re
from collections.abc import Callable

_SMALL = "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi psi omega"
_CAPITAL = "Gamma Delta Theta Lambda Pi Sigma Phi Psi Omega"
_GREEK = set(f"{_SMALL} {_CAPITAL}".split())
_FUNCTIONS = {"exp", "log", "ln", "cos", "sin", "tan", "max", "min", "arg", "det"}
_WORDS = {"for", "if", "else", "and", "or", "of", "of mean", "where", "gets", "position", "then", "with", "within"}
_SYMBOLS = {
    "*": r"\cdot ", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "->": r"\to ", "~": r"\sim ", "..": r"\ldots ",
    "...": r"\ldots ", "inf": r"\infty ", "mod": r"\bmod ", "<": "<", ">": ">", "sum": r"\sum ", ".": r"\cdot ",
    "in": r"\in ", "prod": r"\prod ",
}  # fmt: skip
_TOKEN = re.compile(r"\s*(<=|>=|!=|->|\.\.\.?|[A-Za-z][A-Za-z0-9]*|\d+(?:\.\d+)?(?:e-?\d+)?|[-+*/^_=<>~,;.|(){}'])")
_RELATIONS = {"=", "<=", ">=", "!=", "<", ">", "~", "->", ",", ";", "in", *_WORDS}
_NO_FORMULA = re.compile(
    r"""["'\[\]:`#%&@\\] | == | \*\* | \(\)         # Python
    | \w\.\w | \w= | =\w | [a-z]{2}_[a-z]{2}        # attributes, options, names
    | [A-Z]{3} | ^\W+$ | ^[\w.+-]+$                # paths, signs and words alone
    | ^(?!min|max|exp|log)\w+\(\w+(,[ ]\w+)*\)$   # calls
    """,
    re.X,
)
_GAP = r"\s{3,}"
_CLOSE = {"(": ")", "{": "}", "|": "|"}


def latex(text: str, flat: bool = False) -> str:
    """A formula in LaTeX.

    ``^`` and ``_`` take a number, a name or an expression in brackets; a product of neighbours binds more tightly than
    ``/``. If `flat`, fractions stay on one line. Raises ValueError for text that is not a formula.
    """
    reader = _Reader(text)
    made = reader.line("", flat)
    if reader.tokens:
        raise ValueError(f"no formula: {text!r}")
    return made


def is_formula(text: str) -> bool:
    """Whether code is a formula rather than a name, a call or a value of Python."""
    if re.fullmatch(rf"([A-Za-z]|{'|'.join(_GREEK)})_\w", text):
        return True
    if _NO_FORMULA.search(text):
        return False
    names = re.findall(r"[A-Za-z]+", text)
    known = [name for name in names if len(name) <= 2 or name in _GREEK | _FUNCTIONS | {"sqrt", "floor", "sum"}]
    signs = re.search(r"[=^/+<>*]| - |_", text)
    if not signs or 2 * len(known) < len(names):
        return False
    try:
        latex(text)
    except ValueError:
        return False
    return True


def is_display(block: str) -> bool:
    """Whether every line of a block is a formula, or several formulas with wide gaps between them."""
    return all(is_formula(part) for line in block.strip().splitlines() for part in re.split(_GAP, line.strip()))


def typeset(page: str, to_mathml: Callable[[str, bool], str]) -> str:
    """A page of HTML with its formulas in MathML.

    Args:
        page: the HTML.
        to_mathml: converts LaTeX to MathML; its second argument says whether the formula has its own line.
    """
    page = re.sub(
        r'<div class="formula">(.*?)</div>',
        lambda match: "\n".join(_display(line, to_mathml) for line in html.unescape(match[1]).strip().splitlines()),
        page,
        flags=re.S,
    )

    def inline(match: re.Match) -> str:
        if match[1] is None:
            return match[0]
        text = html.unescape(match[1])
        return to_mathml(latex(text, flat=True), False) if is_formula(text) else match[0]

    return re.sub(r"<pre>.*?</pre>|<code>([^<]*)</code>", inline, page, flags=re.S)


def _display(line: str, to_mathml: Callable[[str, bool], str]) -> str:
    whole = r"\qquad ".join(latex(part) for part in re.split(_GAP, line.strip()))
    return f'<p class="formula">{to_mathml(whole, True)}</p>'


class _Reader:
    """Reads a formula from left to right; each method takes its tokens and returns their LaTeX."""

    def __init__(self, text: str):
        self.tokens: list[str] = []
        end = 0
        text = text.strip()
        while end < len(text):
            match = _TOKEN.match(text, end)
            if not match:
                raise ValueError(f"no formula: {text!r}")
            self.tokens.append(match[1])
            end = match.end()

    def line(self, stop: str, flat: bool = False) -> str:
        """Sums and the relations between them, up to the bracket `stop`."""
        made = []
        while self.tokens and self.tokens[0] != stop:
            token = self.tokens[0]
            if token in _RELATIONS | {"+", "-"}:
                made.append(self._relation(self.tokens.pop(0)))
            else:
                made.append(self._quotient(stop, flat))
        return "".join(made)

    def _relation(self, token: str) -> str:
        if token in _WORDS:
            return rf"\text{{ {token} }}"
        return _SYMBOLS.get(token, token + r"\;" * (token in ",;"))

    def _quotient(self, stop: str, flat: bool) -> str:
        """A product, divided by the factor after each ``/``."""
        made = self._product(stop, flat)
        while self.tokens and self.tokens[0] == "/":
            self.tokens.pop(0)
            below = self._factor(flat, bare=not flat)
            made = f"{made}/{below}" if flat else rf"\frac{{{_unwrapped(made)}}}{{{below}}}"
        return made

    def _product(self, stop: str, flat: bool) -> str:
        made = []
        while self.tokens and self.tokens[0] not in _RELATIONS | {"+", "-", "/", stop}:
            if self.tokens[0] in ("*", ".", "mod", "..", "..."):
                made.append(_SYMBOLS[self.tokens.pop(0)])
            else:
                made.append(self._factor(flat))
        if not made:
            raise ValueError(f"no formula: {' '.join(self.tokens)!r}")
        return "".join(made)

    def _factor(self, flat: bool, bare: bool = False) -> str:
        """A number, a name, a call or brackets, with its superscripts and subscripts."""
        made = self._atom(flat, bare)
        while self.tokens and self.tokens[0] in ("^", "_", "'"):
            sign = self.tokens.pop(0)
            made += sign if sign == "'" else f"{sign}{{{self._script()}}}"
        return made

    def _script(self) -> str:
        """A superscript or subscript: its brackets are left out, and fractions stay on one line."""
        sign = self.tokens.pop(0) if self.tokens and self.tokens[0] == "-" else ""
        if self.tokens and self.tokens[0] in "({":
            close = _CLOSE[self.tokens.pop(0)]
            return sign + self._closed(close, flat=True).replace(r",\;", ",")
        if self.tokens and re.fullmatch("[a-z]{2,3}", self.tokens[0]) and self.tokens[0] not in _GREEK:
            return sign + self.tokens.pop(0)  # several indices
        return sign + self._atom(flat=True, bare=False)

    def _atom(self, flat: bool, bare: bool) -> str:
        if not self.tokens:
            raise ValueError("no formula: it ends early")
        token = self.tokens.pop(0)
        if token in _CLOSE:
            inner = self._closed(_CLOSE[token], flat)
            return inner if bare and token == "(" else _bracketed(token, inner)
        if token in ("sqrt", "floor") and self.tokens[:1] == ["("]:
            self.tokens.pop(0)
            inner = self._closed(")", flat)
            return rf"\sqrt{{{inner}}}" if token == "sqrt" else rf"\left\lfloor {inner}\right\rfloor "
        if not token[0].isalnum():
            raise ValueError(f"no formula: unexpected {token!r}")
        return _name(token)

    def _closed(self, close: str, flat: bool) -> str:
        inner = self.line(close, flat)
        if not self.tokens:
            raise ValueError(f"no formula: {close!r} is missing")
        self.tokens.pop(0)
        return inner


def _bracketed(token: str, inner: str) -> str:
    """An expression in brackets, which grow with fractions."""
    left, right = {"(": ("(", ")"), "{": (r"\{", r"\}"), "|": ("|", "|")}[token]
    return rf"\left{left}{inner}\right{right}" if r"\frac" in inner else f"{left}{inner}{right}"


def _unwrapped(made: str) -> str:
    """A numerator without the brackets around all of it."""
    whole = made.startswith("(") and made.endswith(")") and "(" not in made[1:]
    return made[1:-1] if whole else made


def _name(token: str) -> str:
    if token in _GREEK:
        return rf"\{token} "
    if token in _FUNCTIONS:
        return rf"\{token} "
    if token in _SYMBOLS:
        return _SYMBOLS[token]
    if len(token) == 1 or token[0].isdigit():
        return token
    if token[0].isalpha() and token[1:].isdigit():
        return f"{token[0]}_{{{token[1:]}}}"
    return rf"\mathrm{{{token}}}"
