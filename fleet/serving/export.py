"""Saves what a job has learnt as a model to serve, and loads it as a model of plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from fleet.checkpoint import inference
from fleet.checkpoint.inference import InferenceModel, TableFacts, ids_key
from fleet.checkpoint.places import place_at
from fleet.errors import ArgumentTypeError, CheckpointError, UnsupportedError
from fleet.nn.embedding import BAGS, EMBEDDINGS, is_remote
from fleet.nn.exported_program import check_examples, export_program, save_program
from fleet.nn.frozen import FrozenTable, freeze
from fleet.nn.handle import TableHandle, handle_of
from fleet.numeric.tensors import dtype_name, kind_of

#: Under this name a file of tensors says what belongs to none of them.
_NOT_A_NAME = "__metadata__"


def check_model(model: object) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError("model must be a torch.nn.Module", got=type(model).__name__)
    return model


def check_dirname(dirname: object) -> str:
    text = os.fspath(dirname) if isinstance(dirname, os.PathLike) else dirname
    if not isinstance(text, str):
        raise ArgumentTypeError("dirname must be a path", got=type(dirname).__name__)
    if "://" in text and not text.startswith("file://"):
        raise UnsupportedError(
            "a model to serve lies in a directory of this machine",
            expected="a path",
            got=text,
            todo="Save it into a directory and copy that to the store; to load it, copy it from there.",
        )
    place = place_at(text)
    return place.url if "://" in text else text


def own_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what ``state_dict()`` holds: the parameters and buffers themselves. Extra state may be anything."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for key in remote_tables(state):
        if ids_key(key) in state:
            raise UnsupportedError(
                f"{ids_key(key)!r} of the model has the name that the ids of the table {key!r} need", todo="Rename it."
            )
    return state


def state_in_job(model: torch.nn.Module, tables: Collection[int]) -> dict[str, torch.Tensor]:
    """Return ``own_state`` if the running job, which has the tables of these identities, has all of the model's remote
    ones."""
    state = own_state(model)
    for key, handle in remote_tables(state).items():
        if id(handle) not in tables:
            raise UnsupportedError(
                f"{key!r} is a remote table that does not belong to the running job",
                todo="Hand its weight to the job's optimizer. One that joined late belongs to it after the next step.",
            )
    return state


def remote_tables(state: Mapping[str, torch.Tensor]) -> dict[str, TableHandle]:
    handles = {key: handle_of(value) for key, value in state.items()}
    return {key: handle for key, handle in handles.items() if handle is not None}


def state_to_save(model: torch.nn.Module, tables: Collection[int], example_inputs: object) -> dict[str, torch.Tensor]:
    """Return ``state_in_job`` if it can be saved; otherwise refuse it on every worker, whichever will write."""
    if example_inputs is not None:
        check_examples(example_inputs)
    state = state_in_job(model, tables)
    for key, value in state.items():
        if key == _NOT_A_NAME:  # safetensors writes it, and cannot read it
            raise UnsupportedError(
                f"{key!r} of the model's state cannot be saved for serving", expected="another name", todo="Rename it."
            )
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise UnsupportedError(
                f"{key!r} of the model's state cannot be saved for serving",
                expected="a dense tensor",
                got=value.layout if isinstance(value, torch.Tensor) else type(value).__name__,
            )
    return state


def save(
    dirname: str,
    model: torch.nn.Module,
    learn: Callable[[], dict[str, torch.Tensor]],
    tables: Mapping[str, TableFacts],
    example_inputs: object,
    instead: Mapping[int, object],
) -> None:
    """Write what the job has learnt of a model, which ``learn`` gathers; with examples also a program of the model.
    ``instead`` is for ``freeze``."""
    inference.check_place(dirname)
    learnt = InferenceModel(learn(), tables)
    if not isinstance(example_inputs, tuple):
        inference.write(dirname, learnt, None)
        return
    program = export_program(_frozen(model, learnt, instead), example_inputs)
    inference.write(dirname, learnt, partial(save_program, program))


def load(dirname: str, model: torch.nn.Module | None) -> dict[str, torch.Tensor] | torch.nn.Module:
    """Return what ``save`` wrote: its tensors, or a copy of ``model`` that serves with them."""
    saved = inference.read(dirname)
    if model is None:
        return dict(saved.values)
    _check_fits(dirname, saved, model)
    return _frozen(model, saved, {})


def _frozen(model: torch.nn.Module, saved: InferenceModel, instead: Mapping[int, object]) -> torch.nn.Module:
    tables = {
        key: FrozenTable(
            saved.values[ids_key(key)], saved.values[key], facts.num_embeddings, facts.mean, facts.zero_padding
        )
        for key, facts in saved.tables.items()
    }
    return freeze(model, saved.values, tables, instead)


def _check_fits(dirname: str, saved: InferenceModel, model: torch.nn.Module) -> None:
    there = {key: kind_of(value) for key, value in saved.values.items()}
    for key, facts in saved.tables.items():
        del there[ids_key(key)]
        there[key] = table_kind_of(saved.values[key].dtype, facts.num_embeddings, facts.embedding_dim)
    wanted = _wanted(model, saved.tables)
    problems = [
        f"{key!r}: {there.get(key, 'absent')} in the directory, {wanted.get(key, 'absent')} in the model"
        for key in sorted(there.keys() | wanted.keys())
        if there.get(key) != wanted.get(key)
    ]
    if problems:
        raise CheckpointError(
            "the model is not the one that was saved",
            where=dirname,
            got="; ".join(problems),
            todo="Build it as it was for save_inference_model.",
        )


def _wanted(model: torch.nn.Module, tables: Mapping[str, TableFacts]) -> dict[str, str]:
    """Return what a model needs, in the words of ``kind_of``; an embedding of torch's can take a table or all rows."""
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = {}
    for key, value in own_state(model).items():
        module: Any = modules.get(key.rpartition(".")[0])
        takes_rows = is_remote(module) or (key in tables and isinstance(module, EMBEDDINGS + BAGS))
        if key.rpartition(".")[2] == "weight" and takes_rows:
            wanted[key] = table_kind_of(value.dtype, module.num_embeddings, module.embedding_dim)
        else:
            wanted[key] = kind_of(value)
    return wanted


def table_kind_of(dtype: torch.dtype, num_embeddings: object, dim: object) -> str:
    """Return the same of a table."""
    ids = "any id" if num_embeddings is None else f"{num_embeddings} ids"
    return f"table of {dtype_name(dtype)} x {dim} for {ids}"
