-- Takes all keys for one owner, or none. Keys that the owner already holds count as taken: the request is a retry.
-- KEYS the locks, then the fence counter if a fence is required; ARGV value of the locks, ttl in ms, number of locks, number of fences
-- Reply {1, first fence or ''} if granted; {0, ms until the last lease expires or -1 if unknown} if held by another owner
local locks = tonumber(ARGV[3])
local own = {}
local expires_in = 0
for i = 1, locks do
  local holder = redis.call('GET', KEYS[i])
  -- Compare the owner alone: a claim of another owner may have added the contended mark.
  if holder and string.sub(holder, 1, 32) == string.sub(ARGV[1], 1, 32) then
    own[i] = holder
  elseif holder then
    local left = redis.call('PTTL', KEYS[i])
    if left < 0 or expires_in < 0 then expires_in = -1 else expires_in = math.max(expires_in, left, 1) end
  end
end
if expires_in ~= 0 then return {0, expires_in} end

local fence = mint(KEYS[locks + 1], ARGV[4])
for i = 1, locks do
  -- Never shorten the lease: this may be a late request with a shorter ttl.
  local left = own[i] and redis.call('PTTL', KEYS[i]) or 0
  redis.call('SET', KEYS[i], own[i] or ARGV[1], 'PX', math.max(left, tonumber(ARGV[2])))
end
return {1, fence}
