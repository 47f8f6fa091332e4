/*
 * A hand-over between two instances: an owner offers what a request of it computes, and a reader reads it from the
 * owner's memory, rank by rank. The reader lets it join its cache only after the last word of each rank of the owner,
 * which that says while it still holds the blocks. A model of `transfer_manager/peer` and `fastdeploy_cache/peers`.
 *
 * Any message may be late, also for ever, which is as if it were lost, or overtaken by others. Any process may die, and
 * each side may give up at any time. A receive that has failed may be followed by another one of the same offer. The
 * owner's engine may die and begin again.
 *
 * Each name in FAULTS brings a known class of fault back: `-DNO_LAST_WORD` and so on.
 *
 * What is left out: several sources of one rank, layers and blocks of which only some are complete, ids, time.
 *
 * FAULTS: NO_LAST_WORD CONFIRM_GONE READ_AHEAD FREE_AT_FIRST FREE_AT_RELEASE JOIN_SOME SAME_INSTANCE ANY_READER
 *         NO_DEADLINE
 */
#ifndef NUM_ASKS
#define NUM_ASKS 1 /* how often each message may be sent */
#endif
#ifndef NUM_RECEIVES
#define NUM_RECEIVES 2
#endif
#ifndef MAX_DEATHS
#define MAX_DEATHS 1 /* of ranks, on each side */
#endif

/* the owner's memory */
#define EMPTY 0
#define OFFERED 1
#define ANOTHER 2

/* a send on a rank of the owner */
#define NOT_BEGUN 0
#define OPEN 1
#define READ_WELL 2
#define ENDED 3

/* what an engine has heard of a rank */
#define NOTHING 0
#define OK 1
#define BAD 2

/* a rank's process */
#define UP 0
#define DEAD 1
#define DOWN 2

/* a receive on a rank of the reader */
#define IDLE 0
#define ASKING 1
#define COMPLETE 2
#define HAS_READ 3
#define WELL 4
#define FAILED 5

#define NOBODY 2

typedef Owner {
    byte process, send, heard, bound = NOBODY;
    bit knows_all;    /* that all is computed */
    bit confirmed[2]; /* by number of the receive: remembered, as the answer may be lost */
};
typedef Reader {
    bit is_dead;
    byte at;
    bit has_good;     /* what it has read is what was offered */
};
typedef Messages {
    bit subscribe, confirm, leave; /* to the owner */
    bit all, why, yes;             /* to the reader */
    byte num_subscribed, num_confirmed;
};

byte memory;
bit is_sent, is_held = 1, is_cancelled, is_freed, life; /* of the owner's engine */
byte num_owner_deaths, num_reader_deaths;
Owner owner[2];
Reader reader[2];
byte number = NOBODY; /* of the receive that runs, or ran last */
bit is_over;          /* that receive */
bit joined;
typedef Box { Messages with[2] };
Box box[2]; /* by rank, of each receive */

/* what must never be so; each is 1 for a moment only, before the search ends */
bit wrong_byte;      /* what joins the reader's cache is not what was offered */
bit word_of_another; /* a send ends well by the word of another receive than the one that reads it */
bit left_behind;     /* blocks of a send, or a receive, that never ends */

#define TO(r, n) box[r].with[n]
#define OWNER_RUNS(r) (owner[r].process == UP)
#define READER_RUNS(r) (!reader[r].is_dead)
#ifdef SAME_INSTANCE
#define IS_MINE true
#else
#define IS_MINE (life == 0) /* a number is of one run of an instance */
#endif

inline end_send(r, how) {
    owner[r].send = how;
    if :: how == ENDED && owner[r].bound != NOBODY -> TO(r, owner[r].bound).why = 1; :: else fi
}

inline fail(r) {
    reader[r].at = FAILED;
    TO(r, number).leave = 1
}

#ifdef NO_LAST_WORD
#define MAY_JOIN(r) (reader[r].at >= HAS_READ && reader[r].at != FAILED)
#else
#define MAY_JOIN(r) (reader[r].at == WELL)
#endif
#ifdef JOIN_SOME
#define MAY_JOIN_ALL (MAY_JOIN(0) || MAY_JOIN(1))
#else
#define MAY_JOIN_ALL (MAY_JOIN(0) && MAY_JOIN(1))
#endif
#define HAS_ENDED(r) (reader[r].at == WELL || reader[r].at == FAILED || reader[r].is_dead)
#ifdef FREE_AT_FIRST
#define MAY_FREE (owner[0].heard != NOTHING || owner[1].heard != NOTHING)
#elif defined(FREE_AT_RELEASE)
#define MAY_FREE true
#else
#define MAY_FREE (owner[0].heard != NOTHING && owner[1].heard != NOTHING)
#endif
#ifdef CONFIRM_GONE
#define MAY_CONFIRM(r, n) true
#elif defined(ANY_READER)
#define MAY_CONFIRM(r, n) (owner[r].send == OPEN && owner[r].knows_all)
#else
#define MAY_CONFIRM(r, n) (owner[r].send == OPEN && owner[r].knows_all && owner[r].bound == n)
#endif
#ifdef NO_DEADLINE
#define HAS_DEADLINE false
#else
#define HAS_DEADLINE true
#endif
#ifdef READ_AHEAD
#define MAY_READ(r) (reader[r].at == COMPLETE || reader[r].at == ASKING)
#else
#define MAY_READ(r) (reader[r].at == COMPLETE)
#endif

/* ---- what a rank of the owner does with a message of receive n */
#define OWNER_HEARS(r, n) \
:: atomic { OWNER_RUNS(r) && TO(r, n).subscribe && !(IS_MINE && is_sent && owner[r].send == NOT_BEGUN) -> \
    TO(r, n).subscribe = 0; \
    if :: IS_MINE && owner[r].send == OPEN -> \
        owner[r].bound = n; \
        if :: owner[r].knows_all -> TO(r, n).all = 1; :: else fi; \
       :: else -> TO(r, n).why = 1; fi } \
:: atomic { OWNER_RUNS(r) && TO(r, n).confirm -> \
    TO(r, n).confirm = 0; \
    if :: IS_MINE && owner[r].confirmed[n] -> TO(r, n).yes = 1; \
       :: IS_MINE && !owner[r].confirmed[n] && MAY_CONFIRM(r, n) -> \
        owner[r].confirmed[n] = 1; TO(r, n).yes = 1; \
        if :: owner[r].send == OPEN -> \
            word_of_another = owner[r].bound != n; \
            assert(!word_of_another); \
            owner[r].send = READ_WELL; :: else fi; \
       :: else -> TO(r, n).why = 1; fi } \
:: atomic { OWNER_RUNS(r) && TO(r, n).leave -> \
    TO(r, n).leave = 0; \
    if :: IS_MINE && owner[r].send == OPEN && (owner[r].bound == n || owner[r].bound == NOBODY) -> \
        owner[r].send = ENDED; :: else fi }

/* ---- a rank of the owner, and what its engine does about it */
#define OWNER_STEPS(r) \
:: atomic { is_sent && OWNER_RUNS(r) && owner[r].send == NOT_BEGUN && owner[r].heard == NOTHING -> \
    owner[r].send = OPEN } \
:: atomic { OWNER_RUNS(r) && owner[r].send == OPEN && memory == OFFERED && !owner[r].knows_all -> \
    owner[r].knows_all = 1; \
    if :: owner[r].bound != NOBODY -> TO(r, owner[r].bound).all = 1; :: else fi } \
:: atomic { OWNER_RUNS(r) && owner[r].send == OPEN && life == 1 && !owner[r].knows_all -> owner[r].knows_all = 1 } \
/* it is late, its reader is silent, or its engine has cancelled it */ \
:: atomic { HAS_DEADLINE && OWNER_RUNS(r) && owner[r].send == OPEN -> end_send(r, ENDED) } \
:: atomic { is_sent && owner[r].heard == NOTHING && owner[r].send == READ_WELL && OWNER_RUNS(r) -> \
    owner[r].heard = OK } \
:: atomic { is_sent && owner[r].heard == NOTHING && owner[r].send == ENDED && OWNER_RUNS(r) -> owner[r].heard = BAD } \
:: atomic { OWNER_RUNS(r) && num_owner_deaths < MAX_DEATHS -> \
    owner[r].process = DEAD; num_owner_deaths++ } \
:: atomic { owner[r].process == DEAD -> \
    owner[r].process = DOWN; \
    owner[r].send = NOT_BEGUN; owner[r].bound = NOBODY; owner[r].knows_all = 0; \
    owner[r].confirmed[0] = 0; owner[r].confirmed[1] = 0; \
    if :: is_sent && owner[r].heard == NOTHING -> owner[r].heard = BAD; :: else fi } \
:: atomic { owner[r].process == DOWN -> owner[r].process = UP } \
OWNER_HEARS(r, 0) \
OWNER_HEARS(r, 1)

/* ---- a rank of the reader */
#define READER_STEPS(r) \
:: atomic { READER_RUNS(r) && !is_over && reader[r].at == ASKING && TO(r, number).num_subscribed < NUM_ASKS -> \
    TO(r, number).subscribe = 1; TO(r, number).num_subscribed++ } \
:: atomic { READER_RUNS(r) && !is_over && reader[r].at == ASKING && TO(r, number).all -> \
    TO(r, number).all = 0; reader[r].at = COMPLETE } \
:: atomic { READER_RUNS(r) && !is_over && MAY_READ(r) -> \
    reader[r].at = HAS_READ; reader[r].has_good = memory == OFFERED && life == 0 } \
:: atomic { READER_RUNS(r) && !is_over && reader[r].at == HAS_READ && TO(r, number).num_confirmed < NUM_ASKS -> \
    TO(r, number).confirm = 1; TO(r, number).num_confirmed++ } \
:: atomic { READER_RUNS(r) && !is_over && reader[r].at == HAS_READ && TO(r, number).yes -> \
    TO(r, number).yes = 0; reader[r].at = WELL } \
:: atomic { READER_RUNS(r) && !is_over && reader[r].at >= ASKING && reader[r].at <= HAS_READ && TO(r, number).why -> \
    TO(r, number).why = 0; fail(r) } \
/* nobody wants it any more, it is late, or the owner is silent */ \
:: atomic { READER_RUNS(r) && !is_over && reader[r].at >= ASKING && reader[r].at <= HAS_READ -> fail(r) } \
:: atomic { READER_RUNS(r) && number != NOBODY && num_reader_deaths < MAX_DEATHS -> \
    reader[r].is_dead = 1; num_reader_deaths++ }

init {
    do
    /* the owner's engine */
    :: atomic { life == 0 && !is_sent && memory == EMPTY -> is_sent = 1 }
    :: atomic { life == 0 && is_sent && is_held && memory == EMPTY -> memory = OFFERED }
    :: atomic { life == 0 && is_sent && is_held && MAY_FREE -> is_held = 0 }
    :: atomic { life == 0 && is_sent && !is_held && memory != ANOTHER -> memory = ANOTHER }
    /* it dies with all of its ranks; the next one offers something else, under the same number */
    :: atomic { life == 0 && is_sent && num_owner_deaths < MAX_DEATHS ->
        life = 1; num_owner_deaths++; memory = ANOTHER; is_held = 1;
        owner[0].send = NOT_BEGUN; owner[0].bound = NOBODY; owner[0].knows_all = 0; owner[0].heard = NOTHING;
        owner[0].confirmed[0] = 0; owner[0].confirmed[1] = 0; owner[0].process = UP;
        owner[1].send = NOT_BEGUN; owner[1].bound = NOBODY; owner[1].knows_all = 0; owner[1].heard = NOTHING;
        owner[1].confirmed[0] = 0; owner[1].confirmed[1] = 0; owner[1].process = UP }
    :: atomic { life == 1 && is_held && MAY_FREE -> is_held = 0 }
    /* the reader's engine */
    :: atomic { is_sent && number == NOBODY -> number = 0; reader[0].at = ASKING; reader[1].at = ASKING }
    :: atomic { NUM_RECEIVES == 2 && number == 0 && is_over && !joined ->
        number = 1; is_over = 0;
        reader[0].at = ASKING; reader[0].is_dead = 0; reader[0].has_good = 0;
        reader[1].at = ASKING; reader[1].is_dead = 0; reader[1].has_good = 0 }
    :: atomic { number != NOBODY && !is_over && MAY_JOIN_ALL ->
        is_over = 1; joined = 1;
        wrong_byte = !(reader[0].has_good && reader[1].has_good);
        assert(!wrong_byte) }
    :: atomic { number != NOBODY && !is_over && HAS_ENDED(0) && HAS_ENDED(1) && !MAY_JOIN_ALL -> is_over = 1 }
    :: atomic { timeout ->
        left_behind = is_held || !is_over;
        assert(!left_behind);
        break }
    OWNER_STEPS(0)
    OWNER_STEPS(1)
    READER_STEPS(0)
    READER_STEPS(1)
    od
}
