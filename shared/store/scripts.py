"""The store's atomic steps on one server, in Lua; a cluster uses those that touch a single key.

A script that moves a sample to another state is a function of the table in `shared/core/lifecycle.py`: its source holds
the allowed steps (`steps_of`). Only EXPIRE is left to Redis, which carries it out through the time to live.

House rules: a seq_id or a clone number is never a Lua number, which would round it above 2**53, but always text. Byte
offsets are those of `shared/core/record.py`, counted from one. The work of one call is bounded. Scripts that free
memory, or that report what is lost or given up, also run when the server is full (`allow-oom`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shared.core.lifecycle import Event
from shared.redis.commands import Script

if TYPE_CHECKING:
    from shared.core.lifecycle import Transitions

EVEN_WHEN_FULL: Final = "#!lua flags=allow-oom\n"


def steps_of(transitions: Transitions) -> str:
    """Return Lua source of `allows(from, to)`: whether `transitions` lead from one state's letter to the other's."""
    steps = (
        f"{before.value}>{after.value}" for (before, event), after in transitions.items() if event is not Event.EXPIRE
    )
    return f"""
local function allows(from, to)
  return string.find(' {" ".join(steps)} ', ' ' .. from .. '>' .. to .. ' ', 1, true)
end
"""


# append(log, entry, epoch, ttl_ms): a log is a list. Its first element is "<epoch> <number of trimmed entries>"; the
# others are entries, each of which ends with its time in ms. Every log that begins gets a new random epoch, so that a
# cursor of an older log is recognised. Every 32nd call drops old entries; the newest always stays.
APPEND: Final = """
local function append(log, entry, epoch, ttl_ms)
  local length = redis.call('RPUSHX', log, entry)
  if length == 0 then length = redis.call('RPUSH', log, epoch .. ' 0', entry) end
  if length % 32 == 0 then
    local cut_ms = string.match(entry, '%d+$') - ttl_ms
    local function is_old(old) return old and tonumber(string.match(old, '%d+$')) < cut_ms end
    if is_old(redis.call('LINDEX', log, '1')) then
      local oldest, old = redis.call('LRANGE', log, '0', '64'), 0
      while old < length - 2 and is_old(oldest[old + 2]) do old = old + 1 end
      local epoch_before, trimmed = string.match(oldest[1], '^(%d+) (%d+)$')
      -- The last entry to drop becomes the first element.
      redis.call('LSET', log, old, epoch_before .. ' ' .. string.format('%d', trimmed + old))
      redis.call('LTRIM', log, old, '-1')
    end
  end
  redis.call('PEXPIRE', log, ttl_ms)
end
"""


def begin(transitions: Transitions) -> Script:
    """Build: KEYS record, open set; ARGV header, member. Returns the header that was there first, or false."""
    return Script(
        steps_of(transitions)
        + """
if allows('', 'P') and redis.call('SET', KEYS[1], ARGV[1], 'NX') then
  redis.call('SADD', KEYS[2], ARGV[2])
  return false
end
local found = redis.call('GETRANGE', KEYS[1], '0', '39')
local state = string.sub(found, 1, 1)
if found ~= '' and allows(state, 'P') then
  redis.call('SET', KEYS[1], ARGV[1])
  redis.call('SADD', KEYS[2], ARGV[2])
  return false
end
if state == 'P' and string.sub(found, 25, 40) == string.sub(ARGV[1], 25, 40) then
  redis.call('SADD', KEYS[2], ARGV[2])
end
return found
"""
    )


# KEYS[1] record; ARGV[1..2] record, ttl_ms. Continues after it has written; otherwise returns 1 (repeated) or 2
# (refused). The usual case, the header of this very claim, takes one comparison.
WRITE_ENDING: Final = """
local found = redis.call('GETRANGE', KEYS[1], '0', '39')
local state, wanted = string.sub(found, 1, 1), string.sub(ARGV[1], 1, 1)
local mine = found == 'P-' .. string.sub(ARGV[1], 3, 40) or found == ''
if not mine then
  local function owner_of(record) return string.sub(record, 25, 40) .. string.sub(record, 3, 4) end
  mine = owner_of(found) == owner_of(ARGV[1])
end
if not mine or not allows(state, wanted) then
  -- It ended so before, and may have been handed over since.
  if mine and (state == wanted or allows(wanted, state)) then return 1 end
  return 2
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
"""
WRITTEN: Final = "return found == '' and 3 or 0\n"


def settle(transitions: Transitions, flags: str = "") -> Script:
    """Build: KEYS record, open set, log; ARGV record, ttl_ms, member, entry, epoch.

    Returns 0 written, 1 repeated, 2 refused, 3 written where nothing was.
    """
    return Script(
        flags
        + steps_of(transitions)
        + APPEND
        + WRITE_ENDING
        + """
redis.call('SREM', KEYS[2], ARGV[3])
append(KEYS[3], ARGV[4], ARGV[5], ARGV[2])
"""
        + WRITTEN
    )


# KEYS any key of the server. Returns its memory limit in bytes; 0 means none.
LIMIT_BYTES: Final = Script(
    EVEN_WHEN_FULL
    + """
return tonumber(string.match(redis.call('INFO', 'memory'), 'maxmemory:(%d+)'))
"""
)

# KEYS record; ARGV owner, attempt (2 bytes), mark.
MARK_PAUSED: Final = Script(
    EVEN_WHEN_FULL
    + """
local found = redis.call('GETRANGE', KEYS[1], 0, 39)
if string.sub(found, 1, 1) == 'P' and string.sub(found, 25, 40) == ARGV[1] and string.sub(found, 3, 4) == ARGV[2] then
  redis.call('SETRANGE', KEYS[1], 1, ARGV[3])
end
return 0
"""
)


def start_clock(transitions: Transitions) -> Script:
    """Build: KEYS records; ARGV ttl_ms, r (handed over) or a (acknowledged). Returns how many clocks it started.

    SETRANGE keeps the time to live, and a clock that leaves less is left alone. A sample that was acknowledged before
    it was counted as handed over gets A: the worker that handed it over still counts it.
    """
    return Script(
        EVEN_WHEN_FULL
        + steps_of(transitions)
        + """
local started = 0
local next_clocks = ARGV[2] == 'r' and {['-'] = 'r', A = 'a'} or {['-'] = 'A', r = 'a'}
for _, key in ipairs(KEYS) do
  local head = redis.call('GETRANGE', key, '0', '1')
  local state, clock = string.sub(head, 1, 1), next_clocks[string.sub(head, 2, 2)]
  if clock and state ~= 'P' then
    if allows(state, 'D') then state = 'D' end
    redis.call('SETRANGE', key, '0', state .. clock)
    redis.call('PEXPIRE', key, ARGV[1], 'LT')
    started = started + 1
  end
end
return started
"""
    )


# KEYS records. Returns 1 for each that is settled and has not started its clock, and 0 for each other one.
ARE_UNREAD: Final = Script("""
local unread = {}
for n, key in ipairs(KEYS) do
  local head = redis.call('GETRANGE', key, 0, 1)
  local is_unread = head ~= '' and string.sub(head, 1, 1) ~= 'P' and string.sub(head, 2, 2) == '-'
  unread[n] = is_unread and 1 or 0
end
return unread
""")

# KEYS log; ARGV epoch, n, limit. Returns {1 if the cursor is known, epoch, n after the entries, entries}, or {} without
# a log. The epoch that a client sees is mixed with the server's run id (`schema.run_number`): a server that came back
# with an older state reuses the numbers of the entries that it lost, and a client would skip the new ones.
READ_LOG_MIXED: Final = """
local first = redis.call('LINDEX', KEYS[1], '0')
if not first then return {} end
local epoch, trimmed = string.match(first, '^(%d+) (%d+)$')
local shown = bit.bxor(tonumber(epoch), run)
local n, known, passed = tonumber(ARGV[2]), 0, 0
if ARGV[1] == string.format('%d', shown) and n >= 1 and n < trimmed + redis.call('LLEN', KEYS[1]) then
  known, passed = 1, math.max(n - trimmed, 0)
end
local entries = redis.call('LRANGE', KEYS[1], passed + 1, passed + ARGV[3])
return {known, shown, trimmed + passed + #entries, entries}
"""
# With unmixed epochs: the caller knows the run id, which saves the server an INFO.
READ_LOG: Final = Script("local run = 0\n" + READ_LOG_MIXED)


def reap(transitions: Transitions) -> Script:
    """Build: KEYS open set, known instances, lease; ARGV prefix, owner, ttl_ms, now_ms, epoch, limit.

    Returns {number of entries left, member, ...} with the members that became ORPHANED.
    """
    return Script(
        EVEN_WHEN_FULL
        + steps_of(transitions)
        + APPEND
        + """
local reaped = {0}
for _, member in ipairs(redis.call('SRANDMEMBER', KEYS[1], ARGV[6])) do
  local key = ARGV[1] .. ':s:' .. member
  local head = redis.call('GETRANGE', key, 0, 39)
  if string.sub(head, 25, 40) == ARGV[2] and allows(string.sub(head, 1, 1), 'O') then
    redis.call('SET', key, 'O-' .. string.sub(head, 3), 'PX', ARGV[3])
    local session, seq = string.match(member, '^(.*):(%d+)$')
    local clone = #seq > 9 and string.sub(seq, 1, -10) or '0'
    append(ARGV[1] .. ':d:{' .. session .. '}:' .. clone, 'X ' .. seq .. ' 0 ' .. ARGV[4], ARGV[5], ARGV[3])
    reaped[#reaped + 1] = member
  end
  redis.call('SREM', KEYS[1], member)
end
reaped[1] = redis.call('SCARD', KEYS[1])
if reaped[1] == 0 and redis.call('EXISTS', KEYS[3]) == 0 then redis.call('SREM', KEYS[2], ARGV[2]) end
return reaped
"""
    )


# KEYS session; ARGV now_ms, ttl_ms. Returns {seen before, finished, seen now}.
_TOUCH_SESSION: Final = """
local found = redis.call('HMGET', KEYS[1], 'seen', 'finished')
local seen = found[1]
if not seen or tonumber(seen) < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'seen', ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {found[1] or '', found[2] or '', redis.call('HGET', KEYS[1], 'seen')}
"""
TOUCH_SESSION: Final = Script(EVEN_WHEN_FULL + _TOUCH_SESSION)
# For what needs room in the store: a full server refuses it.
TOUCH_SESSION_IF_ROOM: Final = Script(_TOUCH_SESSION)

# KEYS session; ARGV now_ms, ttl_ms. Returns 1 to the first caller that finishes it.
FINISH_SESSION: Final = Script(
    EVEN_WHEN_FULL
    + """
local first = redis.call('HSETNX', KEYS[1], 'finished', ARGV[1])
redis.call('HSETNX', KEYS[1], 'seen', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return first
"""
)

# KEYS inbox; ARGV channel, message, ttl_ms, PUBLISH or SPUBLISH.
SEND_CONTROL: Final = Script(
    EVEN_WHEN_FULL
    + """
redis.call('RPUSH', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call(ARGV[4], ARGV[1], ARGV[2])
return 0
"""
)

# KEYS list; ARGV list, which begins with its version. Returns the list that is kept.
OFFER_UPSTREAMS: Final = Script(
    EVEN_WHEN_FULL
    + """
local found = redis.call('GET', KEYS[1])
if found and tonumber(string.match(found, '^%d+')) >= tonumber(string.match(ARGV[1], '^%d+')) then return found end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""
)

# KEYS lock; ARGV holder, ttl_ms. Returns 1 if the holder has it now.
TAKE_LOCK: Final = Script(
    EVEN_WHEN_FULL
    + """
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
)

# KEYS lock; ARGV holder.
RELEASE_LOCK: Final = Script("""
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
""")
