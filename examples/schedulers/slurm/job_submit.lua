-- Jobs that want Penstock to choose their nodes: sbatch --comment="penstock model=llama-3-70b batch=2048 nodes=4-16"
--
-- This runs inside slurmctld, under its locks: whatever it waits for, the whole cluster waits for. So it asks nobody.
-- It checks the comment, marks the job and holds it; place-held-jobs, a process of its own, asks Penstock for each
-- held job, writes the nodes into it and releases it.
--
-- Install: copy to the directory of slurm.conf, and JobSubmitPlugins=lua there.

local WORD = "penstock"
local KNOWN = { model = true, profile = true, batch = true, nodes = true, objective = true }

-- The settings of a comment; nil where it is none of ours, and what is wrong with it.
local function settings_of(comment)
    if comment == nil or not (comment == WORD or comment:match("^" .. WORD .. "%s")) then
        return nil, nil
    end
    local found = {}
    for word in comment:sub(#WORD + 1):gmatch("%S+") do
        local key, value = word:match("^([%w_]+)=([%w%._/:-]+)$")
        if key == nil or not KNOWN[key] then
            return nil, "'" .. word .. "' is none of model=, profile=, batch=, nodes=, objective="
        end
        found[key] = value
    end
    if (found.model == nil) == (found.profile == nil) then
        return nil, "give model=NAME or profile=FILE, one of the two"
    end
    if found.batch == nil or not found.batch:match("^[1-9]%d*$") then
        return nil, "give batch=SAMPLES, the global batch size"
    end
    if found.nodes ~= nil and not (found.nodes:match("^%d+$") or found.nodes:match("^%d+%-%d*$")) then
        return nil, "nodes=" .. found.nodes .. " is not a number of nodes; give 16, 4-16 or 4-"
    end
    return found, nil
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    local settings, fault = settings_of(job_desc.comment)
    if fault ~= nil then
        slurm.log_user("penstock: %s", fault)
        return slurm.ERROR
    end
    if settings ~= nil and job_desc.req_nodes == nil then
        job_desc.admin_comment = WORD
        job_desc.priority = 0
        slurm.log_user("penstock: the job is held until its nodes are chosen")
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
