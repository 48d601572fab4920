"""When a gradient is applied and when a wait is over. One file a mode; adding one is that file and a line here."""

from fleet.ps.consistency import asynchronous, geo, half_async, ssp, sync
from fleet.ps.consistency.gate import Mode

MODES: dict[str, Mode] = {
    mode.name: mode for mode in (sync.MODE, asynchronous.MODE, half_async.MODE, geo.MODE, ssp.MODE)
}
