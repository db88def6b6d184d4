#!lua name=rlharvest
-- The ledger in Redis or Valkey. Keys of a job share the hash tag {job}:
--   rlharvest:{job}:head   hash: epoch, stream, applied, generation, log_bytes
--   rlharvest:{job}:log    list: records applied since the snapshot, each one kind byte and the message
--   rlharvest:{job}:state  hash: handle -> "state attempt length worker" when the state changed, for people and for checks
--   rlharvest:{job}:snap:G hash: snapshot of generation G
-- Every call carries the epoch of the coordinator and what it believes to be applied. A lower epoch is refused (FENCED):
-- a newer coordinator took over. Another position is refused (DIVERGED): this store lost its tail, or is a new one.

-- Arguments of one command; Lua's stack holds some thousands.
local MOST = 1000

local function refused(head, epoch, stream, applied)
  local have = redis.call('HMGET', head, 'epoch', 'stream', 'applied')
  if tonumber(have[1] or '0') > tonumber(epoch) then return 'FENCED ' .. have[1] end
  if (have[2] or '') ~= stream or (have[3] or '0') ~= applied then
    return 'DIVERGED ' .. (have[2] or '-') .. ' ' .. (have[3] or '0')
  end
  return nil
end

-- KEYS head. ARGV epoch. A coordinator takes the job over; returns {stream, applied, generation} as they are.
local function begin(keys, argv)
  local have = redis.call('HMGET', keys[1], 'epoch', 'stream', 'applied', 'generation')
  if tonumber(have[1] or '0') > tonumber(argv[1]) then return redis.error_reply('FENCED ' .. have[1]) end
  redis.call('HSET', keys[1], 'epoch', argv[1])
  return {have[2] or '', have[3] or '0', have[4] or '0'}
end

-- KEYS head. ARGV epoch, stream, applied: the log is another stream from here on, of which `applied` is done.
local function rebase(keys, argv)
  local epoch = redis.call('HGET', keys[1], 'epoch') or '0'
  if tonumber(epoch) > tonumber(argv[1]) then return redis.error_reply('FENCED ' .. epoch) end
  redis.call('HSET', keys[1], 'epoch', argv[1], 'stream', argv[2], 'applied', argv[3])
  return 'OK'
end

-- KEYS head, log, state.
-- ARGV epoch, stream, applied before, applied after, number of records, records..., then pairs handle, state ('' deletes).
-- Returns the bytes of the log.
local function commit(keys, argv)
  local no = refused(keys[1], argv[1], argv[2], argv[3])
  if no then return redis.error_reply(no) end
  local records = 5 + tonumber(argv[5])
  local bytes = 0
  for i = 6, records do
    bytes = bytes + #argv[i]
  end
  for i = 6, records, MOST do
    redis.call('RPUSH', keys[2], unpack(argv, i, math.min(i + MOST - 1, records)))
  end
  for i = records + 1, #argv, 2 do
    if argv[i + 1] == '' then
      redis.call('HDEL', keys[3], argv[i])
    else
      redis.call('HSET', keys[3], argv[i], argv[i + 1])
    end
  end
  redis.call('HSET', keys[1], 'epoch', argv[1], 'applied', argv[4])
  return redis.call('HINCRBY', keys[1], 'log_bytes', bytes)
end

-- KEYS head, log, old snapshot. ARGV epoch, stream, applied, new generation. The snapshot of that generation, which was
-- written before, holds all that is applied: the log starts anew.
local function compact(keys, argv)
  local no = refused(keys[1], argv[1], argv[2], argv[3])
  if no then return redis.error_reply(no) end
  redis.call('DEL', keys[2], keys[3])
  redis.call('HSET', keys[1], 'generation', argv[4], 'log_bytes', '0')
  return 'OK'
end

-- KEYS cursor. ARGV epoch, stream, applied, mark: every message up to `applied`, whose digest is `mark`, is applied to every
-- job. Never goes back.
local function cursor(keys, argv)
  local have = redis.call('HMGET', keys[1], 'epoch', 'stream', 'applied')
  if tonumber(have[1] or '0') > tonumber(argv[1]) then return redis.error_reply('FENCED ' .. have[1]) end
  if have[2] == argv[2] and tonumber(have[3]) > tonumber(argv[3]) then return 'OK' end
  redis.call('HSET', keys[1], 'epoch', argv[1], 'stream', argv[2], 'applied', argv[3], 'mark', argv[4])
  return 'OK'
end

redis.register_function('rlharvest_cursor', cursor)
redis.register_function('rlharvest_begin', begin)
redis.register_function('rlharvest_rebase', rebase)
redis.register_function('rlharvest_commit', commit)
redis.register_function('rlharvest_compact', compact)
