from .agreement import (
    check_agreement as check_agreement,
    check_declared as check_declared,
    difference as difference,
    mismatch as mismatch,
    text_of as text_of,
)
from .arguments import (
    SCALARS as SCALARS,
    TreeBuffers as TreeBuffers,
    check_out as check_out,
    check_shape as check_shape,
    checked_array as checked_array,
    checked_extents as checked_extents,
    checked_options as checked_options,
    checked_peer as checked_peer,
    checked_tag as checked_tag,
    is_tree as is_tree,
    members_of as members_of,
    rank_at as rank_at,
    refuse_out_of_tree as refuse_out_of_tree,
    ring_pairs as ring_pairs,
    shift_pairs as shift_pairs,
)
from .buffers import Message as Message, all_to_all_nbytes as all_to_all_nbytes, chunk_nbytes as chunk_nbytes
from .call import (
    ARRAY as ARRAY,
    SCALAR as SCALAR,
    CollectiveCall as CollectiveCall,
    MemberCall as MemberCall,
    Moved as Moved,
    Traffic as Traffic,
    moved_alike as moved_alike,
)
from .explanation import Explanation as Explanation, explain as explain
from .registration import register_algorithm as register_algorithm, register_kind as register_kind
from .results import (
    Reduction as Reduction,
    Result as Result,
    call_fields as call_fields,
    checked_root as checked_root,
    copy_of as copy_of,
    plain_pairs as plain_pairs,
    result_of as result_of,
)
