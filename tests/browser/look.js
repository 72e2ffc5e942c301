// What a test asks of a page: functions of Visit.look(NAME, ARGUMENT).
({
    // The value of each widget that the selector finds.
    widgets: selector => [...document.querySelectorAll(selector)].map(widget => {
        const kind = widget.dataset.testid
        const label = widget.querySelector('[data-testid=stWidgetLabel]')?.innerText.trim() ?? ''
        const all = part => [...widget.querySelectorAll(part)]
        const value = {
            stSelectbox: () => all('input').map(input => input.value),
            stMultiSelect: () => all('[data-testid=stMultiSelectTagsContainer]').map(tags => tags.innerText.trim()),
            stRadio: () => all('input').map(input => input.checked),
            stCheckbox: () => all('input').map(input => input.checked),
            stTextInput: () => all('input').map(input => input.value),
            stNumberInput: () => all('input').map(input => input.value),
            stSlider: () => all('[role=slider], input[type=range]').map(e => e.getAttribute('aria-valuenow') ?? e.value),
            stButtonGroup: () => all('button, [role=radio], [role=checkbox]').map(e => [
                e.innerText.trim(),
                e.ariaChecked ?? e.ariaPressed ?? e.dataset.selected ?? (e.dataset.testid ?? '').includes('Active')]),
        }[kind]()
        return {kind, label, value}
    }),

    // By how many pixels the window and the page scroll sideways.
    sideways: () => [document.scrollingElement, document.querySelector('[data-testid=stMain]')]
        .map(box => box.scrollWidth - box.clientWidth),

    // The HTML of what a mouse can work on the page, and the focus has not been on since `forget`.
    missed: () => {
        const roots = [...document.querySelectorAll('[data-testid=stMain], [data-testid=stSidebar]')]
        const every = roots.flatMap(root => [
            ...root.querySelectorAll('a[href], button, input, textarea, summary, [role=slider]')])
        const apart = '[inert], template, [aria-hidden=true], [data-testid=stElementToolbar], ' +
            '[data-testid=stHeadingWithActionElements], [data-testid=stDataFrame]'
        return every.filter(e => {
            const box = (e.closest('label') ?? e).getBoundingClientRect()
            if (e.disabled || e.closest(apart) || box.width < 1 || box.height < 1) return false
            if (getComputedStyle(e).visibility === 'hidden') return false
            if (e.tagName === 'BUTTON' && e.tabIndex < 0) return false  // an arrow of a widget that keys open
            return !window.reached.has(window.place(e))
        }).map(e => e.outerHTML.slice(0, 300))
    },
    forget: () => {
        document.activeElement?.blur()
        window.reached = new Set()
        // Arrow keys move among radio buttons, also where a group draws them as buttons.
        window.place = e => e.type === 'radio' ? e.name : e.role === 'radio' ? e.closest('[role=radiogroup]') ?? e : e
    },
    // Notes what has the focus. Returns whether it had it before.
    note: () => {
        const focused = document.activeElement
        const reached = window.place(focused)
        const again = window.reached.has(reached) && focused !== document.body &&
            !focused.closest('[data-testid=stDataFrame]')  // Tab goes from cell to cell, and out at the last column
        window.reached.add(reached)
        return again
    },

    // Texts of charts that stand out from the page by less than the ratio.
    pale: least => {
        const parts = color => (color.match(/[\d.]+/g) ?? []).map(Number)
        const light = color => color.map(c => c / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0)
        const ground = parts(getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor)
        return [...document.querySelectorAll('[data-testid=stVegaLiteChart] svg text')]
            .filter(text => text.textContent.trim())
            .map(text => {
                const [r, g, b, a = 1] = parts(getComputedStyle(text).fill)
                const seen = [r, g, b].map((c, i) => c * a + ground[i] * (1 - a))
                const [low, high] = [light(seen), light(ground)].sort((x, y) => x - y)
                return [(high + 0.05) / (low + 0.05), text.textContent]
            })
            .filter(([ratio]) => ratio < least)
            .map(([ratio, text]) => `'${text}' in a chart has a contrast of ${ratio.toFixed(1)}`)
    },

    scrolled: () => document.querySelector('[data-testid=stMain]').scrollTop,
})
