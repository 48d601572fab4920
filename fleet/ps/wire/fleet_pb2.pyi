from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Abort(_message.Message):
    __slots__ = ["reason"]
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ["awaits", "figures", "has_values"]
    class FiguresEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    AWAITS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    HAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    awaits: str
    figures: _containers.ScalarMap[str, float]
    has_values: bool
    def __init__(self, figures: _Optional[_Mapping[str, float]] = ..., awaits: _Optional[str] = ..., has_values: bool = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ["divisor", "steps", "together", "tokens", "version", "workers"]
    DIVISOR_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    divisor: int
    steps: _containers.RepeatedScalarFieldContainer[int]
    together: bool
    tokens: _containers.RepeatedScalarFieldContainer[int]
    version: int
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., divisor: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., workers: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., together: bool = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Changes(_message.Message):
    __slots__ = ["fingerprint", "probe", "since", "version", "wait_s"]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    probe: bool
    since: int
    version: int
    wait_s: float
    def __init__(self, since: _Optional[int] = ..., version: _Optional[int] = ..., probe: bool = ..., wait_s: _Optional[float] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Choose(_message.Message):
    __slots__ = ["id", "root", "step", "strict"]
    ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    id: str
    root: str
    step: int
    strict: bool
    def __init__(self, step: _Optional[int] = ..., id: _Optional[str] = ..., strict: bool = ..., root: _Optional[str] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ["by_anyone", "name"]
    BY_ANYONE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    by_anyone: bool
    name: str
    def __init__(self, name: _Optional[str] = ..., by_anyone: bool = ...) -> None: ...

class Clip(_message.Message):
    __slots__ = ["awaited", "parting", "totals", "versions"]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    PARTING_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    awaited: _containers.RepeatedScalarFieldContainer[int]
    parting: bool
    totals: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, versions: _Optional[_Iterable[int]] = ..., totals: _Optional[_Iterable[float]] = ..., awaited: _Optional[_Iterable[int]] = ..., parting: bool = ...) -> None: ...

class Cut(_message.Message):
    __slots__ = ["ids", "scores", "tables", "version"]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedScalarFieldContainer[int]
    version: int
    def __init__(self, tables: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ...) -> None: ...

class Direct(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class DirectAddress(_message.Message):
    __slots__ = ["key", "local", "port"]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    local: str
    port: int
    def __init__(self, port: _Optional[int] = ..., local: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ["ends_job", "expected", "got", "kind", "todo", "what", "where"]
    ENDS_JOB_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TODO_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    ends_job: bool
    expected: str
    got: str
    kind: str
    todo: str
    what: str
    where: str
    def __init__(self, kind: _Optional[str] = ..., what: _Optional[str] = ..., where: _Optional[str] = ..., expected: _Optional[str] = ..., got: _Optional[str] = ..., todo: _Optional[str] = ..., ends_job: bool = ...) -> None: ...

class Export(_message.Message):
    __slots__ = ["checkpoint", "cursor", "version"]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    cursor: str
    version: int
    def __init__(self, cursor: _Optional[str] = ..., version: _Optional[int] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ["fingerprint", "options", "spec"]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    options: _containers.RepeatedScalarFieldContainer[str]
    spec: str
    def __init__(self, spec: _Optional[str] = ..., fingerprint: _Optional[str] = ..., options: _Optional[_Iterable[str]] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ["cursor", "number"]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    number: int
    def __init__(self, number: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class Fill(_message.Message):
    __slots__ = ["about", "at", "attempt", "by", "number", "pushed", "state"]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    about: str
    at: int
    attempt: str
    by: int
    number: int
    pushed: Push
    state: str
    def __init__(self, attempt: _Optional[str] = ..., number: _Optional[int] = ..., about: _Optional[str] = ..., state: _Optional[str] = ..., pushed: _Optional[_Union[Push, _Mapping]] = ..., by: _Optional[int] = ..., at: _Optional[int] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ["server", "servers"]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    server: int
    servers: int
    def __init__(self, server: _Optional[int] = ..., servers: _Optional[int] = ...) -> None: ...

class Gather(_message.Message):
    __slots__ = ["beside", "dtype", "number", "op"]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    beside: bool
    dtype: str
    number: int
    op: str
    def __init__(self, number: _Optional[int] = ..., op: _Optional[str] = ..., dtype: _Optional[str] = ..., beside: bool = ...) -> None: ...

class Give(_message.Message):
    __slots__ = ["last", "name", "steps"]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    last: bool
    name: str
    steps: int
    def __init__(self, name: _Optional[str] = ..., last: bool = ..., steps: _Optional[int] = ...) -> None: ...

class Halt(_message.Message):
    __slots__ = ["attempt", "buffers", "delivered", "endpoints", "gone", "round", "version"]
    class DeliveredEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class GoneEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    delivered: _containers.ScalarMap[int, int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    gone: _containers.ScalarMap[int, int]
    round: int
    version: int
    def __init__(self, attempt: _Optional[str] = ..., version: _Optional[int] = ..., round: _Optional[int] = ..., delivered: _Optional[_Mapping[int, int]] = ..., endpoints: _Optional[_Iterable[str]] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., gone: _Optional[_Mapping[int, int]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ["endpoints", "fingerprint", "former", "job_id", "label", "options", "seed", "server", "spec"]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: str
    former: int
    job_id: str
    label: str
    options: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    server: int
    spec: str
    def __init__(self, spec: _Optional[str] = ..., fingerprint: _Optional[str] = ..., server: _Optional[int] = ..., endpoints: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., options: _Optional[_Iterable[str]] = ..., label: _Optional[str] = ..., job_id: _Optional[str] = ..., former: _Optional[int] = ...) -> None: ...

class Keeping(_message.Message):
    __slots__ = ["asks", "gives", "kept"]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    GIVES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    asks: str
    gives: bool
    kept: bool
    def __init__(self, kept: bool = ..., gives: bool = ..., asks: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ["attempt", "id", "url"]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    id: str
    url: str
    def __init__(self, id: _Optional[str] = ..., url: _Optional[str] = ..., attempt: _Optional[str] = ...) -> None: ...

class Look(_message.Message):
    __slots__ = ["by_server", "former", "job_id", "root"]
    BY_SERVER_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    by_server: bool
    former: int
    job_id: str
    root: str
    def __init__(self, root: _Optional[str] = ..., job_id: _Optional[str] = ..., by_server: bool = ..., former: _Optional[int] = ...) -> None: ...

class Meet(_message.Message):
    __slots__ = ["address", "broken", "group", "has_values", "in_a_step", "leaving", "rounds", "steps"]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    IN_A_STEP_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    address: str
    broken: bool
    group: int
    has_values: bool
    in_a_step: bool
    leaving: bool
    rounds: int
    steps: int
    def __init__(self, group: _Optional[int] = ..., broken: bool = ..., address: _Optional[str] = ..., rounds: _Optional[int] = ..., has_values: bool = ..., steps: _Optional[int] = ..., leaving: bool = ..., in_a_step: bool = ...) -> None: ...

class News(_message.Message):
    __slots__ = ["exact", "lapsed", "newer", "number", "over", "rest_s", "start"]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    LAPSED_FIELD_NUMBER: _ClassVar[int]
    NEWER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    REST_S_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    exact: bool
    lapsed: bool
    newer: bool
    number: int
    over: bool
    rest_s: float
    start: int
    def __init__(self, number: _Optional[int] = ..., exact: bool = ..., lapsed: bool = ..., newer: bool = ..., over: bool = ..., rest_s: _Optional[float] = ..., start: _Optional[int] = ...) -> None: ...

class Norm(_message.Message):
    __slots__ = ["squares", "told", "total", "version"]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    squares: float
    told: bool
    total: float
    version: int
    def __init__(self, version: _Optional[int] = ..., squares: _Optional[float] = ..., told: bool = ..., total: _Optional[float] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ["attempt", "blocks"]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempt: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ["buffers", "gone", "quiet"]
    class GoneEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    gone: _containers.ScalarMap[int, int]
    quiet: bool
    def __init__(self, buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., quiet: bool = ..., gone: _Optional[_Mapping[int, int]] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ["ahead", "counts", "dense", "since", "tables", "training", "version"]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ahead: bool
    counts: _containers.RepeatedScalarFieldContainer[int]
    dense: bool
    since: _containers.RepeatedScalarFieldContainer[int]
    tables: _containers.RepeatedScalarFieldContainer[int]
    training: _containers.RepeatedScalarFieldContainer[bool]
    version: int
    def __init__(self, version: _Optional[int] = ..., dense: bool = ..., tables: _Optional[_Iterable[int]] = ..., training: _Optional[_Iterable[bool]] = ..., ahead: bool = ..., counts: _Optional[_Iterable[int]] = ..., since: _Optional[_Iterable[int]] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ["attempt", "keeping", "now", "options", "own_seconds", "plain", "present", "quiet", "read_at", "row_counts", "row_tables", "rows_read_at", "steps", "token", "unplaced", "used_tables"]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KEEPING_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    OWN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    QUIET_FIELD_NUMBER: _ClassVar[int]
    READ_AT_FIELD_NUMBER: _ClassVar[int]
    ROWS_READ_AT_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    ROW_TABLES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    UNPLACED_FIELD_NUMBER: _ClassVar[int]
    USED_TABLES_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    keeping: Keeping
    now: float
    options: _containers.RepeatedScalarFieldContainer[str]
    own_seconds: float
    plain: bool
    present: bytes
    quiet: bool
    read_at: int
    row_counts: _containers.RepeatedScalarFieldContainer[int]
    row_tables: _containers.RepeatedScalarFieldContainer[int]
    rows_read_at: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    token: int
    unplaced: bool
    used_tables: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, options: _Optional[_Iterable[str]] = ..., present: _Optional[bytes] = ..., row_tables: _Optional[_Iterable[int]] = ..., used_tables: _Optional[_Iterable[int]] = ..., quiet: bool = ..., steps: _Optional[int] = ..., read_at: _Optional[int] = ..., rows_read_at: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., keeping: _Optional[_Union[Keeping, _Mapping]] = ..., now: _Optional[float] = ..., row_counts: _Optional[_Iterable[int]] = ..., token: _Optional[int] = ..., unplaced: bool = ..., own_seconds: _Optional[float] = ..., plain: bool = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ["tables"]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tables: _Optional[_Iterable[int]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ["anew", "attempt"]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    anew: bool
    attempt: str
    def __init__(self, anew: bool = ..., attempt: _Optional[str] = ...) -> None: ...

class Rearrange(_message.Message):
    __slots__ = ["endpoints", "failure"]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    failure: str
    def __init__(self, endpoints: _Optional[_Iterable[str]] = ..., failure: _Optional[str] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ["collection", "everyone", "workers"]
    COLLECTION_FIELD_NUMBER: _ClassVar[int]
    EVERYONE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    collection: str
    everyone: bool
    workers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, collection: _Optional[str] = ..., everyone: bool = ..., workers: _Optional[_Iterable[int]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ["failure", "name"]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    failure: str
    name: str
    def __init__(self, name: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ["about", "broken", "buffers", "changed", "clock", "cursor", "cuts", "delivered", "direct", "error", "gathered", "gone", "granted", "initialized", "lacks", "loads", "meeting", "moves", "news", "norms", "others_give", "row_counts", "steps", "table_clocks", "tensors", "version", "wanted", "wanted_servers"]
    class GoneEntry(_message.Message):
        __slots__ = ["key", "value"]
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GATHERED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    INITIALIZED_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    MEETING_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    NORMS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_GIVE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TABLE_CLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    WANTED_SERVERS_FIELD_NUMBER: _ClassVar[int]
    about: str
    broken: int
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    changed: _containers.RepeatedScalarFieldContainer[int]
    clock: int
    cursor: str
    cuts: _containers.RepeatedScalarFieldContainer[int]
    delivered: int
    direct: DirectAddress
    error: Error
    gathered: int
    gone: _containers.ScalarMap[int, int]
    granted: bool
    initialized: bool
    lacks: int
    loads: int
    meeting: int
    moves: int
    news: News
    norms: _containers.RepeatedCompositeFieldContainer[Norm]
    others_give: bool
    row_counts: _containers.RepeatedScalarFieldContainer[int]
    steps: int
    table_clocks: _containers.RepeatedScalarFieldContainer[int]
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    version: int
    wanted: str
    wanted_servers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., initialized: bool = ..., delivered: _Optional[int] = ..., granted: bool = ..., cursor: _Optional[str] = ..., about: _Optional[str] = ..., steps: _Optional[int] = ..., clock: _Optional[int] = ..., table_clocks: _Optional[_Iterable[int]] = ..., changed: _Optional[_Iterable[int]] = ..., direct: _Optional[_Union[DirectAddress, _Mapping]] = ..., gathered: _Optional[int] = ..., moves: _Optional[int] = ..., loads: _Optional[int] = ..., wanted: _Optional[str] = ..., others_give: bool = ..., cuts: _Optional[_Iterable[int]] = ..., meeting: _Optional[int] = ..., broken: _Optional[int] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ..., gone: _Optional[_Mapping[int, int]] = ..., norms: _Optional[_Iterable[_Union[Norm, _Mapping]]] = ..., news: _Optional[_Union[News, _Mapping]] = ..., wanted_servers: _Optional[_Iterable[str]] = ..., lacks: _Optional[int] = ..., row_counts: _Optional[_Iterable[int]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ["abort", "beat", "bye", "changes", "choose", "claim", "clip", "cut", "direct", "export", "extend", "fetch", "fill", "follow", "gather", "give", "group", "halt", "hello", "incarnation", "load", "look", "meet", "part", "place", "pull", "push", "rank", "ready", "rearrange", "recall", "release", "save", "settle", "shrink", "stage", "status", "step", "survey", "switch", "tensors", "together", "unfollow", "upload", "where", "worker"]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    CHOOSE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    GIVE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    MEET_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REARRANGE_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    SHRINK_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SURVEY_FIELD_NUMBER: _ClassVar[int]
    SWITCH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    UNFOLLOW_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    abort: Abort
    beat: Beat
    bye: Bye
    changes: Changes
    choose: Choose
    claim: Claim
    clip: Clip
    cut: Cut
    direct: Direct
    export: Export
    extend: Extend
    fetch: Fetch
    fill: Fill
    follow: Follow
    gather: Gather
    give: Give
    group: int
    halt: Halt
    hello: Hello
    incarnation: int
    load: Load
    look: Look
    meet: Meet
    part: Part
    place: Place
    pull: Pull
    push: Push
    rank: Rank
    ready: Ready
    rearrange: Rearrange
    recall: Recall
    release: Release
    save: Save
    settle: Settle
    shrink: Shrink
    stage: Stage
    status: Status
    step: int
    survey: Survey
    switch: Switch
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    together: int
    unfollow: Unfollow
    upload: Upload
    where: Where
    worker: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ..., group: _Optional[int] = ..., together: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., upload: _Optional[_Union[Upload, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., push: _Optional[_Union[Push, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., export: _Optional[_Union[Export, _Mapping]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., extend: _Optional[_Union[Extend, _Mapping]] = ..., gather: _Optional[_Union[Gather, _Mapping]] = ..., survey: _Optional[_Union[Survey, _Mapping]] = ..., direct: _Optional[_Union[Direct, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., look: _Optional[_Union[Look, _Mapping]] = ..., choose: _Optional[_Union[Choose, _Mapping]] = ..., give: _Optional[_Union[Give, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., shrink: _Optional[_Union[Shrink, _Mapping]] = ..., rank: _Optional[_Union[Rank, _Mapping]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., meet: _Optional[_Union[Meet, _Mapping]] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., clip: _Optional[_Union[Clip, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., changes: _Optional[_Union[Changes, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., unfollow: _Optional[_Union[Unfollow, _Mapping]] = ..., halt: _Optional[_Union[Halt, _Mapping]] = ..., stage: _Optional[_Union[Stage, _Mapping]] = ..., fill: _Optional[_Union[Fill, _Mapping]] = ..., switch: _Optional[_Union[Switch, _Mapping]] = ..., where: _Optional[_Union[Where, _Mapping]] = ..., rearrange: _Optional[_Union[Rearrange, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ["after", "begin", "folder", "id", "proof", "version"]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    after: str
    begin: bool
    folder: str
    id: str
    proof: str
    version: int
    def __init__(self, id: _Optional[str] = ..., after: _Optional[str] = ..., folder: _Optional[str] = ..., proof: _Optional[str] = ..., version: _Optional[int] = ..., begin: bool = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ["id", "url"]
    ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    id: str
    url: str
    def __init__(self, id: _Optional[str] = ..., url: _Optional[str] = ...) -> None: ...

class Shrink(_message.Message):
    __slots__ = ["now", "version"]
    NOW_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    now: float
    version: int
    def __init__(self, now: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ["about", "attempt", "endpoints", "fingerprint", "server", "spec"]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    about: str
    attempt: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: str
    server: int
    spec: str
    def __init__(self, attempt: _Optional[str] = ..., spec: _Optional[str] = ..., fingerprint: _Optional[str] = ..., server: _Optional[int] = ..., endpoints: _Optional[_Iterable[str]] = ..., about: _Optional[str] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Survey(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Switch(_message.Message):
    __slots__ = ["attempt", "endpoints", "given_up"]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    attempt: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    given_up: bool
    def __init__(self, attempt: _Optional[str] = ..., given_up: bool = ..., endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ["dtype", "shape"]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Unfollow(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class Upload(_message.Message):
    __slots__ = ["anew", "blocks", "edit", "rows", "table", "with_step"]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EDIT_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    WITH_STEP_FIELD_NUMBER: _ClassVar[int]
    anew: bool
    blocks: _containers.RepeatedScalarFieldContainer[int]
    edit: bool
    rows: bool
    table: int
    with_step: bool
    def __init__(self, blocks: _Optional[_Iterable[int]] = ..., rows: bool = ..., table: _Optional[int] = ..., anew: bool = ..., edit: bool = ..., with_step: bool = ...) -> None: ...

class Where(_message.Message):
    __slots__ = ["former"]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    former: int
    def __init__(self, former: _Optional[int] = ...) -> None: ...
