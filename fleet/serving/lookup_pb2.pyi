from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DensePiece(_message.Message):
    __slots__ = ["offset", "parameter", "state", "values"]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    offset: int
    parameter: int
    state: State
    values: bytes
    def __init__(self, state: _Optional[_Union[State, _Mapping]] = ..., parameter: _Optional[int] = ..., offset: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class DenseRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ["dense", "door", "most_bytes", "state", "tables"]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    DOOR_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    dense: _containers.RepeatedCompositeFieldContainer[Parameter]
    door: Door
    most_bytes: int
    state: State
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    def __init__(self, state: _Optional[_Union[State, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., dense: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., most_bytes: _Optional[int] = ..., door: _Optional[_Union[Door, _Mapping]] = ...) -> None: ...

class Door(_message.Message):
    __slots__ = ["key", "local", "port"]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    local: str
    port: int
    def __init__(self, key: _Optional[bytes] = ..., local: _Optional[str] = ..., port: _Optional[int] = ...) -> None: ...

class LookRequest(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class LookUpRequest(_message.Message):
    __slots__ = ["counts", "edition", "ids", "instance", "tables"]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    EDITION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    edition: int
    ids: bytes
    instance: int
    tables: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, instance: _Optional[int] = ..., edition: _Optional[int] = ..., tables: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., ids: _Optional[bytes] = ...) -> None: ...

class Parameter(_message.Message):
    __slots__ = ["dtype", "name", "shape"]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ["gone", "state", "values"]
    GONE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    gone: bool
    state: State
    values: bytes
    def __init__(self, state: _Optional[_Union[State, _Mapping]] = ..., gone: bool = ..., values: _Optional[bytes] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ["age_s", "edition", "instance", "version"]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    EDITION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    edition: int
    instance: int
    version: int
    def __init__(self, instance: _Optional[int] = ..., edition: _Optional[int] = ..., version: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ["dtype", "embedding_dim", "mean", "name", "num_embeddings"]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_DIM_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    embedding_dim: int
    mean: float
    name: str
    num_embeddings: int
    def __init__(self, name: _Optional[str] = ..., embedding_dim: _Optional[int] = ..., num_embeddings: _Optional[int] = ..., mean: _Optional[float] = ..., dtype: _Optional[str] = ...) -> None: ...
